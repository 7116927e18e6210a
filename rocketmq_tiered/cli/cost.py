"""`tiered cost`: what an archive stores and requests, what that costs a month, and what settings would change."""

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fetcher.queries.queue_listing import list_queues
from rocketmq_tiered.cli.arguments import add_archive, add_json, add_prices, add_state_dir, settings_of
from rocketmq_tiered.maintenance.compaction_job import dry_run
from rocketmq_tiered.maintenance.cost import (
    DAY_S,
    KINDS,
    OTHER,
    Alternative,
    ArchiveUse,
    MonthCost,
    PartSizes,
    Prices,
    RequestCounts,
    TopicCost,
    Use,
    batch_age_costs,
    measure,
    month_cost,
    read_prices,
    storage_in_a_year,
    topic_costs,
    ttl_costs,
)
from rocketmq_tiered.process.instance import state_root
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.process.request_counts import instance_of, read_counts
from tiered.catalog.pages import RunIndex
from tiered.console import (
    camel_names,
    counted,
    duration_text,
    print_json,
    print_lines,
    print_table,
    size_text,
)
from tiered.settings.sections import Settings

TOPICS_SHOWN = 20
TOO_YOUNG = "rates and costs of the coming month: not known, because the archive is less than an hour old"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, prices, and where the running instance is."""
    add_archive(parser)
    add_prices(parser)
    add_state_dir(parser)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what the archive stores and requests and what that costs, from one listing of its objects, its catalog,
    and the request counters of the running instance."""
    settings = settings_of(options).settings
    prices = read_prices(Path(options.prices)) if options.prices else Prices()
    with open_for_reading(options.url, settings) as archive:
        store = settings.object_store
        parts = PartSizes(store.multipart_threshold_bytes, store.multipart_part_bytes)
        use = measure(archive.store.list(""), archive.store.clock_ms(), parts)
        topics = topic_costs(use, _messages(archive), prices)
        counts = _counts(archive, settings)
        compaction = dry_run(archive.store, archive.state, settings, prices)
    document = _document(use, topics, counts, prices, settings)
    document["compaction"] = compaction.document()
    document |= {"archive": archive.url, "cluster": archive.cluster, "broker": archive.broker}
    if options.json:
        print_json(document)
    else:
        _print(archive.title, use, topics, counts, prices, settings)
        print_lines("", *compaction.lines("tiered compact"))
    return 0


def _messages(archive: LoadedArchive) -> dict[str, tuple[int, int]]:
    """Topic -> number of its messages, and their bytes before compression."""
    totals: dict[str, tuple[int, int]] = {}
    for queue in list_queues(archive.state, hidden=True, index=RunIndex(archive.store)):
        count, size = totals.get(queue.topic, (0, 0))
        totals[queue.topic] = count + queue.messages, size + queue.bytes
    return totals


def _counts(archive: LoadedArchive, settings: Settings) -> RequestCounts | None:
    instance = instance_of(
        state_root(os.environ), settings.process.state_dir, archive.url, archive.cluster, archive.broker
    )
    return None if instance is None else read_counts(instance)


def _batch_ages(use: ArchiveUse, prices: Prices, settings: Settings) -> list[Alternative]:
    least = use.bytes_a_day / settings.offload.batch_bytes
    return batch_age_costs(use, prices, settings.offload.batch_age_ms, least)


def _document(
    use: ArchiveUse,
    topics: list[TopicCost],
    counts: RequestCounts | None,
    prices: Prices,
    settings: Settings,
) -> dict[str, Any]:
    """The JSON that ``--json`` prints. Rates a day are null while the archive is less than an hour old; the counters of
    requests are null if no instance of `tiered run` for this archive was found."""
    month = month_cost(use, prices, counts)
    rates = {
        "bytes_a_day": use.bytes_a_day,
        "puts_a_day": use.puts_a_day,
        "commits_a_day": use.commits_a_day,
        "storage_month_in_a_year": storage_in_a_year(use, prices),
        "ttl": [{"days": one.value, "storage_month": one.month} for one in ttl_costs(use, prices)],
        "batch_age": [
            {"ms": one.value, "puts_month": one.month} for one in _batch_ages(use, prices, settings)
        ],
    }
    document = {
        "prices": asdict(prices),
        "observed_days": use.observed_days,
        "stored_objects": use.stored_objects,
        "stored_bytes": use.stored_bytes,
        **(dict.fromkeys(rates) if use.is_young else rates),
        "month": asdict(month) | {"total": month.total},
        "kinds": [
            {"kind": KINDS.get(kind, OTHER), **asdict(stored), "puts_a_day": _a_day(use, kind)}
            for kind, stored in sorted(use.stored.items())
        ],
        "topics": [asdict(topic) for topic in topics],
    }
    converted: dict[str, Any] = camel_names(document)
    converted["counters"] = (
        None
        if counts is None
        else {
            "seconds": counts.seconds,
            "requests": dict(counts.requests),
            "uploadedBytes": counts.uploaded_bytes,
            "downloadedBytes": counts.downloaded_bytes,
        }
    )
    return converted


def _a_day(use: ArchiveUse, kind: str) -> float | None:
    if use.is_young:
        return None
    return use.written.get(kind, Use()).puts / use.observed_days


def _print(
    title: str,
    use: ArchiveUse,
    topics: list[TopicCost],
    counts: RequestCounts | None,
    prices: Prices,
    settings: Settings,
) -> None:
    """Print the estimate as tables: objects by kind, the topics that cost most, requests of the running instance,
    the coming month, and what other settings would cost. ``counts``: None if no instance was found."""
    print_lines(f"{title}: {counted(use.stored_objects, 'object')}, {size_text(use.stored_bytes)}")
    print_lines(f"prices: {prices.name}, {prices.date}, in {prices.currency}", "")
    print_table(
        ["kind", "objects", "bytes", "PUTs a day", "storage a month"],
        [
            [
                KINDS.get(kind, OTHER),
                stored.objects,
                size_text(stored.bytes),
                "" if (puts := _a_day(use, kind)) is None else round(puts),
                _amount(prices.storage(stored.bytes)),
            ]
            for kind, stored in sorted(use.stored.items(), key=lambda item: -item[1].bytes)
        ],
    )
    print_lines("")
    print_table(
        ["topic", "messages", "objects of its own", "bytes", "storage a month"],
        [
            [one.topic, one.messages, one.objects, size_text(one.stored_bytes), _amount(one.storage_month)]
            for one in topics[:TOPICS_SHOWN]
        ],
    )
    if len(topics) > TOPICS_SHOWN:
        print_lines(f"and {len(topics) - TOPICS_SHOWN} more topics: --json lists all")
    print_lines("")
    _print_counters(counts)
    _print_month(month_cost(use, prices, counts), use)
    _print_alternatives(use, prices, settings)


def _print_counters(counts: RequestCounts | None) -> None:
    """Print the requests of the running `tiered run`; without one, that reads are missing from the figures."""
    if counts is None:
        print_lines(
            "no tiered run of this archive answers on this host: costs of reads and lists are not included"
        )
        return
    print_table(
        ["request", "since the start", "a day"],
        [
            [name, round(count), "" if counts.is_young else round(count * DAY_S / counts.seconds)]
            for name, count in sorted(counts.requests.items())
        ],
    )
    print_lines(
        f"in {duration_text(counts.seconds)} tiered run has uploaded {size_text(counts.uploaded_bytes)} and downloaded "
        f"{size_text(counts.downloaded_bytes)}"
    )


def _print_month(month: MonthCost, use: ArchiveUse) -> None:
    """Print what the coming month costs. Of an archive less than an hour old only storage is known."""
    if use.is_young:
        print_lines(
            "", f"{TOO_YOUNG}; storing what the archive holds now costs {_amount(month.storage)} a month"
        )
        return
    span = duration_text(use.observed_days * DAY_S)
    rate = f"{size_text(use.bytes_a_day)} and {counted(use.commits_a_day, 'commit')} a day"
    print_lines("", f"cost of the coming month, at the rate of the last {span} ({rate}):")
    parts = {
        "storage": month.storage,
        "PUTs": month.puts,
        "reads": month.gets,
        "lists": month.lists,
        "traffic of reads": month.reads,
        "total": month.total,
    }
    print_table(["", "cost"], [[n, "unknown" if v is None else _amount(v)] for n, v in parts.items()])


def _print_alternatives(use: ArchiveUse, prices: Prices, settings: Settings) -> None:
    """Print what other times to live, and other values of offload.batch_age_ms, would cost a month. Nothing is printed
    for an archive less than an hour old, whose rates are not known."""
    if use.is_young:
        return
    if use.bytes_a_day:
        print_lines(
            "", "cost of storage a month at this rate, once messages expire after a time to live (TTL):"
        )
        rows = [[f"TTL of {one.value} days", _amount(one.month)] for one in ttl_costs(use, prices)]
        rows.append(["no TTL, in a year", _amount(storage_in_a_year(use, prices))])
        print_table(["", "cost"], rows)
    ages = _batch_ages(use, prices, settings)
    if ages and use.commits_a_day:
        present = prices.requests(puts=use.puts_a_day * 30)
        print_lines(
            "", f"cost of PUTs a month (now {_amount(present)}) with other values of offload.batch_age_ms:"
        )
        print_table(["batch age", "cost"], [[duration_text(a.value / 1000), _amount(a.month)] for a in ages])


def _amount(value: float) -> str:
    """An amount of money as text: two digits after the point, for small amounts two significant ones."""
    return f"{value:,.2f}" if value >= 1 or value == 0 else f"{value:.2g}" if value >= 1e-4 else "< 0.0001"

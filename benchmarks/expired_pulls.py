"""What a pull costs after messages expired: ``python -m benchmarks.expired_pulls --out expired_pulls.jsonl``.

A synthetic store becomes an archive of many commits; of a copy most messages expire. The others are pulled from both,
in pairs, each time from an archive that was just opened and in a new order. The figure is the median of the ratios of
processor time. Owns the figure and its limit.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import rocketmq_tiered
from benchmarks.machine import run_child
from benchmarks.recording import record
from benchmarks.report import Row
from benchmarks.synthetic_store import StoreSpec, write_store
from fetcher.archive import Archive
from fetcher.io.waiting import run_sync
from fetcher.rows.pull import PullRequest
from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from tiered.catalog.catalog_reader import load
from tiered.clock import Clock
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import ObjectStoreSettings
from tiered.settings.topic_rules import TopicRule

RATIO_MAX = 1.05
SPEC = StoreSpec(topics=4, queues_per_topic=5, body_bytes=200, messages_per_ms=1)
MESSAGES, LIVING = 120_000, 0.3
BATCH_BYTES = 128 << 10
"""Of a commit, so that there are some hundred."""
BACKFILL = ("offload.batch_bytes", "offload.split_bytes")
COUNT, BYTES_MAX = 32, 16 << 20
Ranges = list[tuple[str, int, int, int]]
"""Topic, queue, first offset and end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when the limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expired_pulls", description=main.__doc__)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("expired_pulls.jsonl"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="expired-pulls-") as name:
        before, after = archives(Path(name), options.messages)
        return record(options.out, measured(before, after, options.pairs), summarize, _table)


def archives(directory: Path, messages: int) -> tuple[str, str]:
    """URLs of an archive without expired messages, and of its copy with most of them expired."""
    write_store(directory / "store", SPEC, messages=messages)
    url = f"file://{directory / 'before'}"
    sets = [f"--set={name}={BATCH_BYTES >> shift}" for shift, name in enumerate(BACKFILL)]
    names = ["--cluster", SPEC.cluster, "--broker", SPEC.broker]
    command = [
        sys.executable,
        "-m",
        "rocketmq_tiered.cli",
        "backfill",
        str(directory / "store"),
        url,
        *names,
        *sets,
    ]
    done = run_child(command)
    if done.exit_code != 0:
        raise RuntimeError(f"backfill: exit code {done.exit_code}: {done.output[-500:]}")
    shutil.copytree(directory / "before", directory / "after")
    root = open_store(f"file://{directory / 'after'}", StoreOptions(ObjectStoreSettings()))
    store = PrefixedStore(root, archive_prefix(SPEC.cluster, SPEC.broker))
    state, now_ms = load(store), store.clock_ms()
    begin_ms = SPEC.start_ms + round(messages / SPEC.messages_per_ms * (1 - LIVING))
    rule = TopicRule("", now_ms - begin_ms, 0, "", None, "", "", "")
    commit_pass(
        store,
        state,
        plan_pass(store, state, lambda _topic: rule, clock=Clock(wall_ms=store.clock_ms)),
        clock=Clock(wall_ms=store.clock_ms),
    )
    root.close()
    return url, f"file://{directory / 'after'}"


def measured(before: str, after: str, pairs: int) -> Iterator[Row]:
    """A row for each pair, the first of which only warms up."""
    with rocketmq_tiered.open(after) as archive:
        ranges = [
            (queue.topic, queue.queue_id, queue.min_offset, queue.max_offset) for queue in archive.queues()
        ]
    messages = sum(end - first for _, _, first, end in ranges)
    with rocketmq_tiered.open(before) as archive:
        stored = sum(queue.messages for queue in archive.queues())
    for number in range(pairs + 1):
        order = (before, after) if number % 2 else (after, before)
        cpu_s = {url: _pulled_s(url, ranges) for url in order}
        if number:
            yield {
                "messages": messages,
                "expired": stored - messages,
                "before_s": cpu_s[before],
                "after_s": cpu_s[after],
            }


def _pulled_s(url: str, ranges: Ranges) -> float:
    """Processor time of opening the archive and pulling ``ranges``."""
    begun_s = time.process_time()
    with rocketmq_tiered.open(url) as archive:
        run_sync(_pull_all(archive, ranges))
    return time.process_time() - begun_s


async def _pull_all(archive: Archive, ranges: Ranges) -> None:
    fetcher = archive.access.fetcher
    for topic, queue, first, end in ranges:
        offset = first
        while offset < end:
            found = await fetcher.pull(PullRequest(topic, queue, offset, COUNT, BYTES_MAX, "g"))
            if found.next_offset <= offset:
                raise RuntimeError(f"{topic}/{queue}: no message at {offset}")
            offset = found.next_offset


def summarize(rows: Sequence[Row]) -> list[Row]:
    """The median ratio, the quartiles, and whether the limit is missed."""
    ratios = [row["after_s"] / row["before_s"] for row in rows]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return [
        {
            "name": "expired pulls",
            "pairs": len(rows),
            "messages": rows[0]["messages"],
            "expired": rows[0]["expired"],
            "ratio": ratio,
            "quartiles": [low, high],
            "before_s": statistics.median(row["before_s"] for row in rows),
            "missed": ["ratio"] if ratio > RATIO_MAX else [],
        }
    ]


def _table(summaries: Sequence[Row]) -> str:
    (found,) = summaries
    low, high = found["quartiles"]
    return (
        f"{found['messages']:,} messages pulled from archives just opened, {found['expired']:,} expired, "
        f"{found['pairs']} pairs: {found['ratio']:.3f} times the processor time (quartiles {low:.3f}, {high:.3f}; "
        f"limit {RATIO_MAX}); {found['before_s']:.2f} s before{'; MISSED' if found['missed'] else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())

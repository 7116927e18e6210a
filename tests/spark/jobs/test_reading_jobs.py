"""Verify, diff, stats and search on a real store's archive, with Spark and by the command line."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fetcher.queries.queue_listing import list_queues
from rocketmq_tiered.maintenance.key_job import compact_keys
from rocketmq_tiered.message_table.options.source_options import Source, SourceOptions
from rocketmq_tiered.process.loaded_archive import open_for_reading
from rocketmq_tiered.spark import read
from rocketmq_tiered.spark.cli.main import main
from rocketmq_tiered.spark.jobs.diff import DifferenceKind, diff
from rocketmq_tiered.spark.jobs.export import export
from rocketmq_tiered.spark.jobs.search import Question, search
from rocketmq_tiered.spark.jobs.stats import Stats, stats
from rocketmq_tiered.spark.jobs.verify import verify
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tests.fetcher.broker_store_writer import WrittenStore
from tests.spark.conftest import archive_store
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import AnomalyKind, verify_archive
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.errors import UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings
from uploader.bound_source import no_offsets
from uploader.log_rule import LogLimits
from uploader.offload import Offloader, OffloadIdentity

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.integration]
RealStore = Callable[[str], Path]


@pytest.fixture(scope="module")
def truth(real_store: RealStore) -> list[dict[str, Any]]:
    queues = load_truth(real_store("K"), "K", FILTER).queues
    return [line for lines in queues.values() for line in lines]


def damaged_copy(archive: Path, target: Path) -> str:
    """A copy with one byte changed in the first stream set object; its key."""
    shutil.copytree(archive, target)
    (file, *_) = sorted(target.rglob("*.sso"))
    data = bytearray(file.read_bytes())
    data[5_000] ^= 0xFF
    file.chmod(0o644)
    file.write_bytes(data)
    return file.name


# -- verify ---------------------------------------------------------------------------------------------------


def test_spark_verify_finds_the_same_as_verify(
    spark: SparkSession, small_archive: Path, tmp_path: Path
) -> None:
    (clean,) = verify(spark, SourceOptions(f"file://{small_archive}"))
    archive = PrefixedStore(FileStore(small_archive), archive_prefix(CLUSTER, "K"))
    assert clean.report == verify_archive(archive, full=True)
    assert clean.report.anomalies == []
    name = damaged_copy(small_archive, tmp_path / "damaged")
    (missing, *_) = sorted((tmp_path / "damaged").rglob("*.so"))
    missing.unlink()
    (found,) = verify(spark, SourceOptions(f"file://{tmp_path / 'damaged'}"))
    damaged = PrefixedStore(FileStore(tmp_path / "damaged"), archive_prefix(CLUSTER, "K"))
    assert found.report == verify_archive(damaged, full=True)
    kinds = {anomaly.kind for anomaly in found.report.anomalies}
    assert {AnomalyKind.DAMAGED, AnomalyKind.MISSING} <= kinds
    assert any(name in anomaly.key and anomaly.range for anomaly in found.report.anomalies)


# -- diff -----------------------------------------------------------------------------------------------------


def store_options(path: Path) -> SourceOptions:
    return SourceOptions(str(path), source=Source.STORE, cluster=CLUSTER, broker="K")


def test_an_archive_equals_its_store(spark: SparkSession, small_archive: Path, real_store: RealStore) -> None:
    report = diff(spark, SourceOptions(f"file://{small_archive}"), store_options(real_store("K") / "store"))
    assert (report.counts, report.examples, report.older) == ({}, (), 0)
    assert report.same == report.compared > 5000


def test_the_archive_of_the_stores_broker_is_compared(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two brokers below one URL: the one that broker.conf names, or a refusal."""
    conf = tmp_path / "broker.conf"
    conf.write_text(f"brokerClusterName={CLUSTER}\nbrokerName=b\n")
    for broker, count in (("a", 3), ("b", 5)):
        store = WrittenStore(tmp_path / broker)
        for number in range(count):
            store.put("t", 0, b"%s %d" % (broker.encode(), number))
        archive_store(store.path, tmp_path / "archive", broker)
    archive = SourceOptions(f"file://{tmp_path / 'archive'}")
    store_b = SourceOptions(str(tmp_path / "b"), source=Source.STORE, broker_conf=str(conf))
    report = diff(spark, archive, store_b)
    assert (report.same, dict(report.counts)) == (5, {})
    with pytest.raises(UsageError, match="holds 2 archives"):
        diff(spark, archive, replace(store_b, broker_conf=None))
    chosen = replace(archive, broker="a")
    assert diff(spark, chosen, store_b).counts == {DifferenceKind.DIFFERENT: 3, DifferenceKind.MISSING: 2}
    code, out, err = run(capsys, "diff", archive.path, tmp_path / "b")
    assert (code, out, err.count("\n"), "--broker" in err) == (2, "", 1, True)


def test_dropped_by_key_compaction_is_no_difference(
    spark: SparkSession, real_store: RealStore, tmp_path: Path
) -> None:
    archive_store(real_store("H2") / "store", tmp_path / "archive", "H2")
    archive = PrefixedStore(FileStore(tmp_path / "archive"), archive_prefix(CLUSTER, "H2"))
    settings = Settings()
    own = replace(settings.key_compaction, min_age_ms=-(10**12))
    dropped = compact_keys(
        archive,
        load(archive),
        replace(settings, key_compaction=own),
        RewriteOptions(tmp_path / "spool", 1 << 30),
        lambda topic: topic == "t_compact_hot",
        apply=True,
    )
    lost = dropped.figures.messages - dropped.figures.new_messages
    store = SourceOptions(str(real_store("H2") / "store"), source=Source.STORE, cluster=CLUSTER, broker="H2")
    report = diff(spark, SourceOptions(f"file://{tmp_path / 'archive'}"), store)
    assert (dict(report.counts), report.compacted, report.compared > 0) == ({}, lost, True)
    assert lost > 1000
    target = f"file://{tmp_path / 'table'}"
    exported = export(
        spark, SourceOptions(f"file://{tmp_path / 'archive'}", topics=("t_compact_hot",)), target
    )
    again = export(spark, SourceOptions(f"file://{tmp_path / 'archive'}", topics=("t_compact_hot",)), target)
    kept = read(
        spark, f"file://{tmp_path / 'archive'}", topic="t_compact_hot", columns=["queueOffset"]
    ).count()
    assert (exported.rows, exported.expired, again.rows) == (kept, 0, 0)


def test_generations_of_a_replaced_log_are_no_difference(spark: SparkSession, tmp_path: Path) -> None:
    for name, count in (("first", 50), ("second", 20)):
        store = WrittenStore(tmp_path / name)
        for number in range(count):
            store.put("t", 0, f"{name} {number}".encode())
        with open_broker_store(store.path) as opened:
            identity, root = OffloadIdentity(CLUSTER, BROKER, name, "run"), FileStore(tmp_path / "archive")
            offloader = Offloader(
                opened,
                root,
                identity,
                SMALL,
                topic_filter=FILTER,
                offsets_source=no_offsets,
                log_limits=LogLimits(replace_log=True),
            )
            offloader.run(threading.Event(), follow=False)
    archive = SourceOptions(f"file://{tmp_path / 'archive'}")
    store_now = SourceOptions(str(tmp_path / "second"), source=Source.STORE, cluster=CLUSTER, broker=BROKER)
    report = diff(spark, archive, store_now)
    assert (report.same, report.older, dict(report.counts)) == (20, 0, {})


def test_missing_extra_different_and_older_messages_are_distinguished(
    spark: SparkSession, small_archive: Path, real_store: RealStore, tmp_path: Path
) -> None:
    """The store lost its first file (older), one record is another (different), its last records are damaged."""
    store = tmp_path / "store"
    shutil.copytree(real_store("K") / "store", store)
    files = sorted((store / "commitlog").iterdir())
    files[0].unlink()
    report = diff(spark, SourceOptions(f"file://{small_archive}"), store_options(store))
    assert (report.counts, report.older > 0) == ({}, True)
    with files[1].open("r+b") as log:
        log.seek(200_000)
        log.write(b"\xa5" * 2_000)
    report = diff(spark, SourceOptions(f"file://{small_archive}"), store_options(store), limit=3)
    assert report.counts[DifferenceKind.UNREADABLE] == 1
    assert report.counts[DifferenceKind.EXTRA] > 0
    assert len(report.examples) == 3
    assert all(one.topic for one in report.examples)


def test_a_message_with_other_bytes_is_different(
    spark: SparkSession, real_store: RealStore, tmp_path: Path
) -> None:
    """A record of 4.9 has no checksum of its own: its producer's address can change undetected."""
    archive_store(real_store("E") / "store", tmp_path / "archive", "K")
    queues = load_truth(real_store("E"), "E", FILTER).queues
    line = queues[("t_one", 0)][5]
    store = tmp_path / "store"
    shutil.copytree(real_store("E") / "store", store)
    phys = line["commitLogOffset"]
    file = max(file for file in (store / "commitlog").iterdir() if int(file.name) <= phys)
    with file.open("r+b") as log:
        log.seek(phys - int(file.name) + 48)  # behind bornTimestamp
        byte = log.read(1)
        log.seek(-1, 1)
        log.write(bytes([byte[0] ^ 1]))
    report = diff(
        spark, SourceOptions(f"file://{tmp_path / 'archive'}", topics=("t_one",)), store_options(store)
    )
    assert report.counts == {DifferenceKind.DIFFERENT: 1}
    (one,) = report.examples
    assert (one.topic, one.queue_id, one.queue_offset) == ("t_one", 0, line["queueOffset"])
    assert report.same == len(queues["t_one", 0]) - 1


# -- stats ----------------------------------------------------------------------------------------------------


def without(found: Stats, topic: str) -> Stats:
    lists = {name: getattr(found, name) for name in ("topics", "queues", "buckets", "tags", "keys")}
    return replace(
        found, **{name: [one for one in rows if one.topic != topic] for name, rows in lists.items()}
    )


def messages_of(line: dict[str, Any]) -> int:
    return len(line.get("inner") or [line])


def test_stats_count_what_the_broker_delivered(
    spark: SparkSession, small_archive: Path, truth: list[dict[str, Any]]
) -> None:
    whole = stats(spark, SourceOptions(f"file://{small_archive}"))
    found = without(whole, "t_compact")  # the broker delivered its compacted copy
    messages: Counter[str] = Counter()
    for line in truth:
        messages[line["topic"]] += messages_of(line)
    assert {one.topic: one.messages for one in found.topics} == dict(messages)
    assert sum(one.messages for one in found.queues) == messages.total() > len(truth)
    assert sum(bucket.messages for bucket in found.buckets) == messages.total()
    with open_for_reading(f"file://{small_archive}", Settings()) as archive:
        listed: Counter[str] = Counter()
        for queue in list_queues(archive.state, hidden=False):
            listed[queue.topic] += queue.messages
    assert listed == {one.topic: one.messages for one in whole.topics}, "as tiered ls"
    assert sum(count for _, count in whole.sizes) == sum(one.messages for one in whole.topics)
    sizes: dict[str, list[int]] = {}
    for line in truth:
        sizes.setdefault(line["topic"], []).append(line["storeSize"])
    for one in found.topics:
        assert one.message_bytes == sum(sizes[one.topic])
        assert one.max_bytes == max(sizes[one.topic])
        assert min(sizes[one.topic]) <= one.p50_bytes <= one.p90_bytes <= one.p99_bytes <= one.max_bytes
    tags: Counter[tuple[str, str]] = Counter()
    for line in truth:
        tags[line["topic"], line["tags"] or ""] += messages_of(line)
    assert all(tags[one.topic, one.name] == one.messages for one in found.tags)
    assert found.keys[0].messages >= found.keys[-1].messages
    stored = sum(one.stored_bytes for one in whole.topics)
    files = sum(file.stat().st_size for file in small_archive.rglob("*.s*o"))
    assert files * 0.5 < stored <= files


def test_queues_with_the_same_id_at_two_brokers_are_counted_apart(
    spark: SparkSession, tmp_path: Path
) -> None:
    for broker, count in (("a", 3), ("b", 5)):
        store = WrittenStore(tmp_path / broker)
        for number in range(count):
            store.put("t", 0, b"%d" % number)
        archive_store(store.path, tmp_path / "archive", broker)
    found = stats(spark, SourceOptions(f"file://{tmp_path / 'archive'}"), headers_only=True)
    assert [(one.broker, one.queue_id, one.messages) for one in found.queues] == [("a", 0, 3), ("b", 0, 5)]
    assert [(one.queues, one.messages) for one in found.topics] == [(2, 8)]


# -- search ---------------------------------------------------------------------------------------------------


def test_a_search_finds_by_header_body_and_time(
    spark: SparkSession, small_archive: Path, truth: list[dict[str, Any]]
) -> None:
    source = SourceOptions(f"file://{small_archive}")
    tagged = [line for line in truth if line["tags"] == "L"]
    rows = search(spark, source, Question(where="tags = 'L'", select=("topic", "queueOffset"))).collect()
    assert len(rows) == len(tagged) > 0
    times = sorted(line["storeTimestamp"] for line in truth)
    since, until = times[len(times) // 3], times[len(times) // 2]
    sql = "SELECT count(*) AS n FROM messages WHERE queueId = 0"
    middle = replace(source, since_ms=since, until_ms=until)
    (row,) = search(spark, middle, Question(sql=sql)).collect()
    assert row["n"] == sum(since <= line["storeTimestamp"] < until and line["queueId"] == 0 for line in truth)
    # Spark's own push-down would let the first of these conditions decide for both.
    twice = "SELECT (SELECT count(*) FROM messages WHERE queueId = 0) AS n, (SELECT count(*) FROM messages) AS every"
    (row,) = search(spark, replace(source, topics=("t_*",)), Question(sql=twice)).collect()
    shown = [line for line in truth if line["topic"].startswith("t_")]
    (compact,) = search(spark, replace(source, topics=("t_compact",)), Question(sql=twice)).collect()
    assert row["n"] - compact["n"] == sum(line["queueId"] == 0 for line in shown)
    assert row["every"] - compact["every"] == len(shown) > row["n"]
    whole = search(spark, source, Question(select=("text",), limit=1)).collect()[0]["text"]
    word = whole[:12].replace("\\", "\\\\")
    found = search(spark, source, Question(body=rf"^\Q{word}\E", select=("text",))).collect()
    assert whole in {row["text"] for row in found}
    assert all(row["text"].startswith(word) for row in found)


def test_an_invalid_query_is_wrong_usage(spark: SparkSession, small_archive: Path) -> None:
    source = SourceOptions(f"file://{small_archive}")
    for question in (
        Question(sql="SELECT 1", where="true"),
        Question(where="nonsense = 3"),
        Question(sql="SELEKT"),
        Question(select=("nothing",)),
    ):
        with pytest.raises(UsageError):
            search(spark, source, question).collect()


# -- the command line -----------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(one) for one in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_verbs_and_exit_codes(
    spark: SparkSession,
    small_archive: Path,
    real_store: RealStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, store = f"file://{small_archive}", real_store("K") / "store"
    code, out, _ = run(capsys, "verify", url, "--json", "--quick")
    assert (code, json.loads(out)[0]["ok"]) == (0, True)
    damaged_copy(small_archive, tmp_path / "damaged")
    code, out, _ = run(capsys, "verify", f"file://{tmp_path / 'damaged'}")
    assert code == 1
    assert "anomaly: damaged" in out
    code, out, _ = run(capsys, "diff", url, store, "--cluster", CLUSTER, "--broker", "K", "--topic", "t_one")
    assert (code, "no difference" in out) == (0, True)
    code, out, _ = run(capsys, "search", url, "--where", "topic = 't_one'", "--limit", 2, "--json")
    assert [json.loads(line)["topic"] for line in out.splitlines()] == ["t_one", "t_one"]
    code, out, _ = run(capsys, "stats", url, "--topic", "t_one", "--headers-only")
    assert (code, out.splitlines()[1].split()[0]) == (0, "t_one")
    code, out, _ = run(capsys, "export", url, f"file://{tmp_path / 'table'}", "--topic", "t_one", "--json")
    assert (code, json.loads(out)["batches"]) == (0, 1)
    for wrong, expected, word in (
        (("stats", f"file://{tmp_path / 'nothing'}"), 3, "no archive"),
        (("stats", url, "--topic", "nowhere"), 3, "nowhere"),
        (("search", url, "--where", "nonsense = 1"), 2, "nonsense"),
        (("search", url, "--sql", "SELEC"), 2, "SYNTAX_ERROR"),
        (("search", url, "--where", "queueId / 0 = 1", "--json"), 2, "DIVIDE_BY_ZERO"),
        (("search", url, "--body", "[", "--json"), 2, "Unclosed character class"),
        (("backfill", url), 2, "STORE is missing"),
        (("verify", "nonsense://"), 2, "nonsense"),
    ):
        code, out, err = run(capsys, *wrong)
        assert (code, out) == (expected, ""), wrong
        assert err.count("\n") == 1, err
        assert word in err


def test_backfill_verb_archives_its_store(
    spark: SparkSession, real_store: RealStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = real_store("K") / "store"
    arguments = (
        "backfill",
        store,
        f"file://{tmp_path}",
        "--cluster",
        CLUSTER,
        "--broker",
        "K",
        "--set",
        "offload.batch_bytes=1048576",
        "--json",
    )
    code, out, _ = run(capsys, *arguments)
    (report,) = json.loads(out)
    assert (code, report["damaged"], report["messages"] > 5000, report["commits"] > 3) == (0, 0, True, True)
    assert report["rawBytes"] > report["storedBytes"] > 0
    archive = PrefixedStore(FileStore(tmp_path), archive_prefix(CLUSTER, "K"))
    found = verify_archive(archive, full=True)
    assert (found.anomalies, found.leftovers, found.counts["messages"]) == ([], [], report["messages"])
    code, out, _ = run(capsys, *arguments[:-1])
    assert "nothing to do" in out

"""LMQs of the message stores of four brokers: the archive has exactly the entries that the brokers returned.

Objects of real stores hold one TTL class each, and every message comes back.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rocketmq_tiered.cli import main
from rocketmq_tiered.spark.jobs.backfill import BackfillOptions
from tests.archive.queue_reader import QueueReader, records_of
from tests.broker_store.opened_store import consume_queues_of
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.lmq_truth import EVERYTHING, Units, truth_of
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tests.spark.jobs.backfill_runs import run as backfill_in_parallel
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.conf import BrokerConf, read_broker_conf
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex, living_runs
from tiered.formats.keys import archive_prefix, parse_set_key
from tiered.model.queue import LMQ_PREFIX, TopicFilter
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.rule_entries import RuleEntry
from tiered.settings.sections import OffloadSettings
from tiered.settings.topic_rules import TopicRules

LMQS_ONLY = TopicFilter(include=("%LMQ%*", "audit"), cluster=CLUSTER, broker=BROKER)


def archived(
    store: Path,
    topic_filter: TopicFilter = EVERYTHING,
    *,
    conf: BrokerConf | None = None,
    settings: OffloadSettings = SMALL,
) -> tuple[Units, PrefixedStore]:
    """What is visible in an archive of ``store``, whose records are those of its log."""
    root = MemoryStore(f"memory://{store}")
    backfill(store, root, topic_filter=topic_filter, conf=conf, settings=settings)
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    log, units = CommitLog([store / "commitlog"]), Units()
    for queue, rows in read_back(archive):
        units[queue] = [(offset, phys) for offset, phys, _ in rows]
        assert all(record == log.read(phys, len(record)) for _, phys, record in rows), queue
    assert verify_archive(archive, depth="full").anomalies == []
    return units, archive


def read_back(archive: PrefixedStore) -> Iterator[tuple[tuple[str, int], list[tuple[int, int, bytes]]]]:
    state = load(archive)
    for key in state.visible_queues():
        yield key[:2], list(records_of(QueueReader(archive, state, key)))


@pytest.mark.parametrize("topic_filter", [EVERYTHING, LMQS_ONLY], ids=["everything", "LMQs only"])
@pytest.mark.parametrize("name", ["L", "M", "N", "O"])
def test_lmqs_equal_the_brokers(
    name: str, topic_filter: TopicFilter, real_store: Callable[[str], Path]
) -> None:
    directory = real_store(name)
    units, _ = archived(directory / "store", topic_filter, conf=read_broker_conf(directory / "broker.conf"))
    assert units == truth_of(directory, topic_filter)


@pytest.mark.parametrize("name", ["L", "M", "N", "O"])
def test_no_queue_is_hidden_or_in_a_second_generation(name: str, real_store: Callable[[str], Path]) -> None:
    """A backfill hides queues that the broker does not show; beside a running broker nothing is hidden."""
    directory = real_store(name)
    _, archive = archived(directory / "store", conf=read_broker_conf(directory / "broker.conf"))
    state = load(archive)
    assert {key for key, _ in state.queues()} == set(state.visible_queues())
    assert {key.generation for key in state.visible_queues()} == {0}


@pytest.mark.parametrize("name", ["L", "M", "N", "O"])
def test_cycles_of_one_record_each_make_the_same(name: str, real_store: Callable[[str], Path]) -> None:
    directory = real_store(name)
    conf = read_broker_conf(directory / "broker.conf")
    units, _ = archived(directory / "store", conf=conf, settings=replace(SMALL, batch_bytes=256))
    assert units == truth_of(directory, EVERYTHING)


@pytest.mark.parametrize("name", ["M", "N"])
def test_units_of_records_are_found_between_holes(name: str, real_store: Callable[[str], Path]) -> None:
    """A queue in RocksDB lacks the offsets that were counted for duplicate names."""
    directory = real_store(name)
    with open_broker_store(directory / "store") as store:
        index = consume_queues_of(store)
        for (topic, queue_id), units in truth_of(directory, EVERYTHING).items():
            for begin in range(0, 2000, 90):
                found = index.units_of_records(topic, queue_id, begin, begin + 600)
                expected = [(offset, phys) for offset, phys in units if begin <= phys < begin + 600]
                assert found[["queue_offset", "phys"]].tolist() == expected


@pytest.mark.parametrize("name", ["L", "M", "N", "O"])
def test_without_consume_queues_only_undecidable_entries_are_missing(
    name: str, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """A commitlog that was copied alone: plain names of 4.9, and queues that start with a retry message."""
    directory = real_store(name)
    shutil.copytree(directory / "store" / "commitlog", tmp_path / "commitlog")
    units, _ = archived(tmp_path, conf=read_broker_conf(directory / "broker.conf"))
    truth = truth_of(directory, EVERYTHING)
    if name == "L":
        for queue in [("audit", 0), ("audit", 1), ("audit", 2), ("%LMQ%only", 0)]:
            del truth[queue]
        truth["audit", 0], truth["audit", 1] = [(2, 521)], [(1, 1379)]  # sent to it
    assert units == truth


RealStore = Callable[[str], Path]
WHOLE_SETS = replace(SMALL, split_bytes=64 << 20)


def _classes(root: FileStore) -> dict[str, set[int]]:
    """Classes of the objects that hold each topic; checks that a set's key names its class."""
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    assert verify_archive(archive, depth="full").anomalies == []
    state, found = load(archive), dict[str, set[int]]()
    for page in living_runs(RunIndex(archive), state):
        for row in page.chunk.runs:
            place = page.chunk.objects[int(row["object"])]
            days = int(place["ttl_class_days"])
            found.setdefault(page.queues[int(row["queue"])].topic, set()).add(days)
            parts = parse_set_key(page.chunk.object_keys[int(place["key"])])
            assert parts is None or parts.batch_id.partition("_")[2] == (f"{days}d" if days else "")
    return found


@pytest.mark.parametrize("is_parallel", [False, True])
def test_topics_with_different_rules_do_not_share_objects(
    is_parallel: bool, real_store: RealStore, tmp_path: Path
) -> None:
    directory = real_store("E")
    topics = sorted(json.loads((directory / "store/config/topics.json").read_text())["topicConfigTable"])
    own = [topic for topic in topics if not topic.startswith(("%", "rmq_sys", "SELF", "TBW", "OFFSET"))]
    short, long = own[0], own[-1]
    rules = TopicRules(
        (RuleEntry(short, ttl="12h"), RuleEntry(long, ttl="20d"), RuleEntry("*", ttl="forever"))
    )
    root = FileStore(tmp_path / "archive")
    if is_parallel:
        options = BackfillOptions(settings=WHOLE_SETS, rules=rules)
        backfill_in_parallel(directory / "store", tmp_path / "archive", options=options)
    else:
        backfill(directory / "store", root, settings=WHOLE_SETS, rules=rules)
    found = _classes(root)
    assert {topic: days for topic, days in found.items() if days != {0}} == {
        topic: days for topic, days in ((short, {1}), (long, {30})) if topic in found
    }
    assert len({0, 1, 30} & set().union(*found.values())) >= 2
    assert check_against_truth(root, directory, "E") > 400


def test_lmqs_share_the_objects_of_their_parents(real_store: RealStore, tmp_path: Path) -> None:
    rules = TopicRules((RuleEntry(f"{LMQ_PREFIX}*", ttl="forever"), RuleEntry("*", ttl="7d")))
    root = FileStore(tmp_path)
    store = real_store("L") / "store"
    backfill(store, root, topic_filter=EVERYTHING, settings=WHOLE_SETS, rules=rules)
    lmqs = {topic: days for topic, days in _classes(root).items() if topic.startswith(LMQ_PREFIX)}
    assert lmqs and set(map(tuple, lmqs.values())) == {(7,)}


def test_a_bucket_holds_little_but_living_messages_after_gc(
    real_store: RealStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = '[{"pattern": "t_[a-k]*", "ttl": "1d"}, {"pattern": "t_[l-p]*", "ttl": "90d"}]'
    flags = ("--set", f"topics.rules={rules}", "--set", "retention.min_archived=1ms")
    url, store = f"file://{tmp_path}/archive", real_store("A")
    source = (str(store / "store"), url, "--broker-conf", str(store / "broker.conf"))
    assert main(["backfill", *source, *flags]) == 0
    assert main(["expire", url, *flags, "--yes", "--apply"]) == 0
    for _ in range(2):  # lists of pending deletions are collected by the one after
        assert main(["gc", url, "--apply", "--grace", "0s"]) == 0
    assert "expired 41,633 messages" in capsys.readouterr().out
    archive = PrefixedStore(FileStore(tmp_path / "archive"), archive_prefix(CLUSTER, BROKER))
    living_bytes = 0.0
    for page in living_runs(RunIndex(archive), load(archive)):
        objects, runs = page.chunk.objects, page.chunk.runs
        of_object = np.bincount(runs["object"], runs["byte_count"], minlength=len(objects))
        living_bytes += float((objects["size_bytes"] * of_object / objects["raw_bytes"]).sum())
    assert sum(info.size_bytes for info in archive.list("")) <= 1.1 * living_bytes

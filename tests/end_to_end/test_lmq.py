"""LMQs of the message stores of four brokers: the archive has exactly the entries that the brokers returned."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.archive.queue_reader import QueueReader
from tests.end_to_end.archive_check import records_of
from tests.end_to_end.lmq_truth import EVERYTHING, Units, truth_of
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.conf import BrokerConf, read_broker_conf
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import OffloadSettings

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
        index = store.consume_queues()
        assert index is not None
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

"""Every real store, read by us, against what its broker returned to the Java client.

Reads the broker's ``checkpoint`` file: flush times and offsets, up to a minute old.

Source: org.apache.rocketmq.store.StoreCheckpoint.
"""

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.broker_store.opened_store import consume_queues_of
from tests.sweeps import sweep
from tests.truth import archived_messages, read_lines, truth_directories
from tiered.broker_store.conf import BrokerNames, read_broker_conf
from tiered.broker_store.damage import proven_phys, record_size
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.consume_queue.index import QueueKind
from tiered.formats.fastjson import loads
from tiered.residency import open_failure

STORES = ("A", "B", "C", "D", "E", "F", "G", "H", "H2", "K")
F_RECORDS_WITHOUT_UNIT = {("t_k_four", 1): 1, ("t_k_one", 0): 1}
"""Killed before its consume queues were flushed: two records of the log have no unit on disk."""


@pytest.fixture(scope="module", params=sweep(STORES, fast=STORES[1:], rest="integration"))
def opened(
    request: pytest.FixtureRequest, real_store: Callable[[str], Path]
) -> Iterator[tuple[str, Path, BrokerStore]]:
    path = real_store(request.param)
    with open_broker_store(path / "store", conf=read_broker_conf(path / "broker.conf")) as store:
        yield request.param, path, store


def _truth(path: Path) -> Path:
    """The truth about the store as it is, not before an expiry or a compaction."""
    plain = path / "truth" / "messages.jsonl.zst"
    return plain.parent if plain.exists() else truth_directories(path)[0].parent / "after2"


def _grew_after_truth(topic: str) -> bool:
    """The timer put records into this topic after the truth was read."""
    return topic.startswith("rmq_sys_REVIVE_LOG_")


def _java_hash(text: str) -> int:
    """java.lang.String.hashCode."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for i in range(0, len(units), 2):
        value = (31 * value + int.from_bytes(units[i : i + 2], "big")) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def test_minimum_and_maximum_offsets(opened: tuple[str, Path, BrokerStore]) -> None:
    name, path, store = opened
    index = consume_queues_of(store)
    seen = set()
    for queue in read_lines(_truth(path) / "queues.jsonl.zst"):
        key = queue["topic"], queue["queueId"]
        seen.add(key)
        maximum = index.max_offset(*key)
        if _grew_after_truth(queue["topic"]):
            assert maximum >= queue["maxOffset"], key
        else:
            missing = F_RECORDS_WITHOUT_UNIT.get(key, 0) if name == "F" else 0
            assert maximum == queue["maxOffset"] - missing, key
        assert index.min_offset(*key) == queue["minOffset"], key
    assert {(queue.topic, queue.queue_id) for queue in index.queues()} <= seen
    assert not index.contains("t_gone", 0)


def test_units_name_the_records_of_the_truth(opened: tuple[str, Path, BrokerStore]) -> None:
    name, path, store = opened
    index = consume_queues_of(store)
    by_queue: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for message in archived_messages(_truth(path)):
        by_queue[message["topic"], message["queueId"]].append(message)
    assert by_queue or name in ("H", "H2")
    compared = 0
    for key, pulled in by_queue.items():
        units = index.units(*key, pulled[0]["queueOffset"], len(pulled))
        missing = F_RECORDS_WITHOUT_UNIT.get(key, 0) if name == "F" else 0
        messages = pulled[: len(pulled) - missing]
        assert units["queue_offset"].tolist() == [m["queueOffset"] for m in messages], key
        assert units["phys"].tolist() == [m["commitLogOffset"] for m in messages], key
        assert units["size"].tolist() == [m["storeSize"] for m in messages], key
        assert units["inner_num"].tolist() == [_inner(m) for m in messages], key
        if key[0] != "SCHEDULE_TOPIC_XXXX" and units["inner_num"].max() == 1:
            hashes = [_java_hash(m["properties"].get("TAGS", "")) for m in messages]
            assert units["tags_code"].tolist() == hashes, key
        compared += len(messages)
    assert compared == sum(len(messages) for messages in by_queue.values()) - (2 if name == "F" else 0)


def _inner(message: dict[str, Any]) -> int:
    return int(message["properties"].get("INNER_NUM", 1)) if "inner" in message else 1


def test_a_unit_inside_a_batch_is_the_whole_batch(real_store: Callable[[str], Path]) -> None:
    with open_broker_store(real_store("A") / "store") as store:
        index = consume_queues_of(store)
        queues = [queue for queue in index.queues() if queue.kind is QueueKind.BATCH]
        ranges = []
        for topic, queue_id, _ in queues:
            for unit in index.units(topic, queue_id, 388, 1):
                ranges.append((int(unit["queue_offset"]), int(unit["queue_offset"] + unit["inner_num"])))
        assert (386, 401) in ranges
        assert all(first <= 388 < end for first, end in ranges)


def test_last_units_and_frontier_lead_to_whole_records(opened: tuple[str, Path, BrokerStore]) -> None:
    _, _, store = opened
    index = consume_queues_of(store)
    frontier = index.frontier_phys()
    assert frontier == proven_phys(store.commit_log, index) <= store.commit_log.max_file_end
    assert index.frontier_phys(frontier - 1) >= frontier - 1
    assert index.shown() == set(index.last_records())
    for queue in index.queues():
        for unit in index.last_unit(queue.topic, queue.queue_id):
            if unit["phys"] >= store.commit_log.broker_min_phys:
                assert record_size(store.commit_log, int(unit["phys"])) == unit["size"]


def test_units_between_positions_are_those_of_every_queue(opened: tuple[str, Path, BrokerStore]) -> None:
    _, _, store = opened
    index = consume_queues_of(store)
    begin = store.commit_log.broker_min_phys
    middle = (begin + store.commit_log.max_file_end) // 2
    lower, upper = index.units_between(begin, middle), index.units_between(middle, 1 << 62)
    for queue in index.queues():
        key = queue.topic, queue.queue_id
        units = index.units(*key, index.min_offset(*key), 1 << 20)
        parts = [part[key]["phys"].tolist() for part in (lower, upper) if key in part]
        assert [phys for part in parts for phys in part] == units["phys"].tolist(), key


def test_topic_table(opened: tuple[str, Path, BrokerStore]) -> None:
    _, path, store = opened
    topics = store.state().topics
    truth = {topic["topic"]: topic for topic in read_lines(_truth(path) / "topics.jsonl.zst")}
    unsaved = truth.keys() - topics.keys()
    assert topics.keys() <= truth.keys()
    # A broker with its configuration in RocksDB writes this one again at every start.
    assert {name for name in unsaved if not name.startswith("%LMQ%")} <= {"rmq_sys_wheel_timer"}
    for name, topic in topics.items():
        for key in ("readQueueNums", "writeQueueNums", "perm", "order", "topicSysFlag"):
            assert topic[key] == truth[name][key], (name, key)
        assert topic.get("attributes", {}) == (truth[name]["attributes"] or {})


def test_consumer_offsets(opened: tuple[str, Path, BrokerStore]) -> None:
    _, path, store = opened
    truth = _document(_truth(path) / "consumer_offset.txt")
    expected = {name: {int(q): offset for q, offset in t.items()} for name, t in truth["offsetTable"].items()}
    expected |= {name: {0: offset} for name, offset in truth.get("lmqOffsetTable", {}).items()}
    found = store.state().consumer_offsets
    assert found.keys() == expected.keys()
    for name, offsets in found.items():
        # The broker's own services (revive, half-message check) continued after the truth was read.
        if "CID_RMQ_SYS_" in name or _grew_after_truth(name):
            assert all(offsets.get(q, 0) >= offset for q, offset in expected[name].items())
        else:
            assert offsets == expected[name], name


def test_delay_offsets_and_subscription_groups(opened: tuple[str, Path, BrokerStore]) -> None:
    _, path, store = opened
    state = store.state()
    delays = _document(_truth(path) / "delay_offset.txt").get("offsetTable", {})
    assert state.delay_offsets.keys() == {int(level) for level in delays}
    assert all(state.delay_offsets[int(level)] >= offset for level, offset in delays.items())
    groups = _document(_truth(path) / "subscription_group.txt")["subscriptionGroupTable"]
    if state.subscription_groups:
        # The client that read the truth has become a group of its own since.
        assert groups.items() <= state.subscription_groups.items()


def _document(path: Path) -> dict[str, Any]:
    document = loads(path.read_bytes())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("name", STORES)
def test_names_are_found_with_and_without_broker_conf(name: str, real_store: Callable[[str], Path]) -> None:
    path = real_store(name)
    for conf in (None, read_broker_conf(path / "broker.conf")):
        with open_broker_store(path / "store", conf=conf) as store:
            assert store.names() == BrokerNames("FxCluster", "fx-a")


def test_expired_store_begins_where_its_files_do(real_store: Callable[[str], Path]) -> None:
    with open_broker_store(real_store("G") / "store") as store:
        assert store.commit_log.min_phys == store.commit_log.broker_min_phys == 8388608


def test_checkpoint_of_5_5_names_the_last_dispatched_record(real_store: Callable[[str], Path]) -> None:
    with open_broker_store(real_store("B") / "store") as store:
        checkpoint = read_checkpoint(store.path)
        assert checkpoint is not None
        index = consume_queues_of(store)
        size = record_size(store.commit_log, checkpoint.dispatched_phys)
        assert size is not None
        assert checkpoint.dispatched_phys + size == index.frontier_phys()


def test_killed_broker_is_dead_but_leaves_its_abort_file(real_store: Callable[[str], Path]) -> None:
    with open_broker_store(real_store("F") / "store") as store:
        report = store.liveness()
        assert report.is_dead
        assert report.is_abort_present


_FIELDS = struct.Struct(">6q")


@dataclass(frozen=True)
class Checkpoint:
    """Times in ms since the epoch, offsets physical; 0 for fields that this broker version does not write."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0
    master_flushed_phys: int = 0
    confirm_phys: int = 0
    dispatched_phys: int = 0
    """5.5: physical offset of the last dispatched record."""


def read_checkpoint(store_path: Path) -> Checkpoint | None:
    """The store's checkpoint; None when missing (a fresh store) or too short."""
    path = store_path / "checkpoint"
    try:
        with path.open("rb") as file:
            data = file.read(_FIELDS.size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise open_failure(path, error) from error
    return Checkpoint(*_FIELDS.unpack(data)) if len(data) == _FIELDS.size else None

"""Every queryMessage and viewMessage answer of real brokers, from their archives.

The broker's answer differs from ours where it is wrong, and only there: it takes equal hashes for equal keys, which
uses up the requested number of messages, counts a message twice that names a key twice, and compares times in whole
seconds after the begin of an index file.

Ground truth of a real store for queries by key, id and time.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fetcher.queries.by_id import OffsetMsgId
from fetcher.queries.by_key import KeyKind, KeyQuery
from tests.end_to_end.offloading import FILTER
from tests.fetcher.queries.archives import RealArchive, archive_of, records_at, records_of_log
from tests.fetcher.queries.counted import CountedQueries
from tests.sweeps import sweep
from tiered.formats.record import Record

STORES = ["A", "B", "C", "D", "E", "F", "G", "H", "H2", "K"]
FAST = [
    ("F", True, 4),
    ("G", True, 15),
    ("H2", True, 1),
    ("K", True, 10),
    ("K", False, 15),
]
"""Store, with index files, every how many of its queries."""
SLOW = [(name, indexed, 1) for name in STORES for indexed in (True, False)]
BROKER_MAX = 64


def explain(line: dict[str, Any], ours: list[int], records: dict[int, Record]) -> set[str]:
    """Why the broker's answer differs; "?" for what has no excuse."""
    broker = line["brokerPhys"]
    reasons: set[str] = set()
    wrong = [phys for phys in broker if not is_key_of(records[phys], line)]
    late = [phys for phys in broker if not line["begin"] <= records[phys].store_timestamp <= line["end"]]
    twice = [phys for phys in broker if records[phys].keys.count(line["key"]) > 1]
    if wrong:
        reasons.add("collision")
    if twice:
        reasons.add("repeated key")
    if late:
        reasons.add("whole seconds")
    for phys in set(ours) - set(broker):
        stored = records[phys].store_timestamp
        if min(abs(stored - line["begin"]), abs(stored - line["end"])) < 1000:
            reasons.add("whole seconds")
        elif len(broker) >= min(BROKER_MAX, line["maxNum"]) and (wrong or late or twice):
            reasons.add("used up")
        else:
            reasons.add("?")
    if set(broker) - set(ours) - set(wrong) - set(late):
        # Messages the broker does not give are newer, and fill our answer.
        reasons.add("used up" if len(ours) >= line["maxNum"] else "?")
    return reasons


@pytest.mark.parametrize(("name", "indexed", "step"), FAST)
def test_queries_by_key(name: str, indexed: bool, step: int, real_store: Callable[[str], Path]) -> None:
    check_queries(name, indexed, step, real_store)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "indexed", "step"), SLOW)
def test_every_query_by_key(name: str, indexed: bool, step: int, real_store: Callable[[str], Path]) -> None:
    assert "collision" in check_queries(name, indexed, step, real_store) or name in ("F", "H", "H2")


def check_queries(name: str, indexed: bool, step: int, real_store: Callable[[str], Path]) -> set[str]:
    """Ours is exact; why the broker's differs, where it does."""
    archive = archive_of(name, real_store, indexed=indexed)
    assert bool(archive.state.indexes) == indexed
    truth, compacted = Truth(archive), archive.compacted()
    lines = [line for line in archive.truth("query_message") if line["topic"] not in compacted][::step]
    asked = whole = whole_equal = 0
    excuses: set[str] = set()
    with CountedQueries(archive.store, archive.state) as queries:
        for line in lines:
            query = KeyQuery(
                line["topic"],
                line["key"],
                KeyKind.ANY,
                line["begin"],
                line["end"],
                line["maxNum"],
                with_hidden=True,
            )
            ours = [message.record.physical_offset for message in queries.by_key(query).messages]
            assert ours == truth.physical_offsets(line)[: line["maxNum"]], line
            asked += 1
            is_equal = sorted(ours) == sorted(line["brokerPhys"])
            if is_whole_time(line):
                whole, whole_equal = whole + 1, whole_equal + is_equal
            if is_equal:
                continue
            found = explain(line, ours, records_at(archive, sorted({*ours, *line["brokerPhys"]})))
            assert "?" not in found, (found, line, ours)
            excuses |= found
    assert asked > 5
    # Without time limits only keys that collide or repeat make a difference, and few were made to. With limits any
    # number may: the recorded ranges begin and end at messages, where whole seconds matter. Each is explained above.
    # A sample may by chance hold more of them.
    assert whole_equal >= (0.9 if step == 1 else 0.8) * whole
    return excuses


def is_whole_time(line: dict[str, Any]) -> bool:
    """Whether a recorded query has no time limits."""
    return bool(line["begin"] == 0 and line["end"] == (1 << 63) - 1)


@pytest.mark.parametrize("name", sweep(["A", "G", "K"], fast=["K"], rest="integration"))
def test_what_the_java_client_keeps_of_an_answer(name: str, real_store: Callable[[str], Path]) -> None:
    """MQAdminImpl drops what is not of the key; where that leaves fewer than requested, ours has more."""
    archive = archive_of(name, real_store)
    compacted, asked = archive.compacted(), 0
    with CountedQueries(archive.store, archive.state) as queries:
        for line in archive.truth("query_message"):
            if (
                not line["clientPhys"]
                or line["topic"] in compacted
                or (line["begin"], line["maxNum"]) != (0, 64)
            ):
                continue
            query = KeyQuery(line["topic"], line["key"], KeyKind.KEY, 0, line["end"], 64)
            ours = [message.record.physical_offset for message in queries.by_key(query).messages]
            if len(line["brokerPhys"]) < 64:
                assert sorted(ours) == sorted(line["clientPhys"]), line
            else:
                assert set(line["clientPhys"]) <= set(ours)
            asked += 1
    assert asked > 3


@pytest.mark.parametrize(
    "name",
    [name if name in ("F", "H2", "K") else pytest.param(name, marks=pytest.mark.soak) for name in STORES],
)
def test_every_message_viewed_by_id(name: str, real_store: Callable[[str], Path]) -> None:
    archive = archive_of(name, real_store)
    truth = {(r.physical_offset, zlib.crc32(r.data)): r.topic for r in records_of_log(archive)}
    viewed = 0
    with CountedQueries(archive.store, archive.state) as queries:
        for line in archive.truth("view_message"):
            if "offsetMsgId" not in line:
                continue  # an offset no message begins at
            found = queries.by_id(OffsetMsgId.parse(line["offsetMsgId"]))
            if found is None:
                # Not a record of the commitlog (a compacted copy, a bad offset), or of a topic that is not archived.
                topic = truth.get((line["phys"], line["crc32"]))
                assert topic is None or not FILTER.admits(topic), line
                continue
            assert (len(found.data), zlib.crc32(found.data)) == (line["size"], line["crc32"])
            assert found.record.physical_offset == line["phys"]
            viewed += 1
        assert queries.requests <= 4 * len(archive.truth("view_message"))
    assert viewed > 5


def test_messages_the_broker_has_expired_are_still_found(real_store: Callable[[str], Path]) -> None:
    """The oldest messages of an archive, as after the broker deleted their files: nothing of its store is read."""
    archive = archive_of("G", real_store)
    oldest = [r for r in records_of_log(archive) if FILTER.admits(r.topic) and r.uniq_key][:100]
    with CountedQueries(archive.store, archive.state) as queries:
        for record in oldest:
            at = record.store_timestamp
            assert record.uniq_key is not None
            # A broker finds nothing in [t, t]: its index knows whole seconds only.
            found = queries.by_key(
                KeyQuery(record.topic, record.uniq_key, KeyKind.UNIQUE, at, at, with_hidden=True)
            )
            assert record.physical_offset in [m.record.physical_offset for m in found.messages]
            by_id = queries.by_id(OffsetMsgId.parse(record.offset_msg_id))
            assert by_id is not None and by_id.data == record.data


def test_pages_continue_one_another(real_store: Callable[[str], Path]) -> None:
    """AaAa has many messages, some of one millisecond."""
    archive = archive_of("K", real_store)
    with CountedQueries(archive.store, archive.state) as queries:
        whole = queries.by_key(KeyQuery("t_keys", "AaAa", max_messages=400))
        pages, after = [], None
        while len(pages) < 400:
            page = queries.by_key(KeyQuery("t_keys", "AaAa", max_messages=7, after=after))
            pages += [message.record.physical_offset for message in page.messages]
            after = page.next
            if after is None:
                break
    offsets = [message.record.physical_offset for message in whole.messages]
    assert pages[: len(offsets)] == offsets
    assert len(set(pages)) == len(pages)
    assert offsets == sorted(offsets, reverse=True)
    assert len(offsets) > 30


SYS_COMMITTED = 0x8


class Truth:
    """Every record of the broker's own commitlog that it shows; the answer to a query from these alone."""

    def __init__(self, archive: RealArchive) -> None:
        self._records: dict[str, list[Record]] = {}
        for record in records_of_log(archive):
            if record.sys_flag & 0xC in (0, SYS_COMMITTED):
                self._records.setdefault(record.topic, []).append(record)

    def physical_offsets(self, line: dict[str, Any]) -> list[int]:
        """All matches of a recorded query, newest first."""
        return [
            record.physical_offset
            for record in reversed(self._records.get(line["topic"], []))
            if is_key_of(record, line) and line["begin"] <= record.store_timestamp <= line["end"]
        ]


def is_key_of(record: Record, line: dict[str, Any]) -> bool:
    """Whether the record carries the requested key."""
    return record.topic == line["topic"] and line["key"] in (*record.keys, record.uniq_key)

"""The broker's own files together with an archive that has not come so far: every message once, none wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fetcher.policy.read_policy import ReadPolicy
from fetcher.queries.archive_queries import ArchiveQueries
from fetcher.queries.both_sides import BothSidesQueries, merged
from fetcher.queries.broker_files_lookup import BrokerSideQueries
from fetcher.queries.by_id import OffsetMsgId
from fetcher.queries.by_key import KeyKind, KeyQuery
from rocketmq_tiered.cli import main
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill
from tests.fetcher.queries.archives import RealArchive, archive_of, records_of_log
from tests.fetcher.queries.query_truth import Truth
from tests.sweeps import sweep
from tiered.archive.index.rocketmq_index_file import HEADER_BYTES, BrokerIndex, broker_hash
from tiered.broker_store.conf import BrokerConf, read_broker_conf
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.errors import CorruptionError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

STORES = [("B", 9), ("E", 9), ("F", 3), ("K", 9)]
"""Store, every how many of its queries."""


def as_it_was(store: ObjectStore, share: float) -> MemoryStore:
    """An archive when it had come through ``share`` of the log."""
    earlier = MemoryStore("memory://earlier")
    for entry in store.list(""):
        earlier.put_if_absent(entry.key, [store.get(entry.key)])
    end = load(earlier).cursor.phys
    for newest in sorted(entry.key for entry in earlier.list("catalog/")):
        if load(earlier).cursor.phys <= share * end:
            break
        earlier.delete([newest])
    return earlier


def conf_of(directory: Path) -> BrokerConf:
    """Of a real store that was moved."""
    return replace(read_broker_conf(directory / "broker.conf"), commitlog_paths=(), store_path=None)


@contextmanager
def both_of(
    archive: RealArchive, policy: ReadPolicy, share: float, store_dir: Path | None = None
) -> Iterator[BothSidesQueries]:
    """Queries of the whole store and of an archive that has ``share`` of it."""
    earlier = as_it_was(archive.store, share)
    path = store_dir or archive.directory / "store"
    with (
        open_broker_store(path, conf=conf_of(archive.directory)) as store,
        ArchiveQueries(earlier, load(earlier)) as queries,
    ):
        yield BothSidesQueries(queries, BrokerSideQueries(store), policy)


@pytest.mark.parametrize("policy", [ReadPolicy.NOT_IN_DISK, ReadPolicy.DISABLE])
@pytest.mark.parametrize(("name", "step"), sweep(STORES, fast=[("F", 3), ("K", 9)], rest="integration"))
def test_every_recorded_query_is_answered_in_full(
    name: str, step: int, policy: ReadPolicy, real_store: Callable[[str], Path]
) -> None:
    archive = archive_of(name, real_store)
    truth, compacted = Truth(archive), archive.compacted()
    asked = newer = 0
    with both_of(archive, policy, 0.6) as queries:
        end = queries._archive.state.cursor.phys
        assert 0 < end < archive.state.cursor.phys
        for line in [line for line in archive.truth("query_message") if line["topic"] not in compacted][
            ::step
        ]:
            query = KeyQuery(
                line["topic"], line["key"], KeyKind.ANY, line["begin"], line["end"], line["maxNum"],
                with_hidden=True,
            )  # fmt: skip
            ours = [message.record.physical_offset for message in queries.by_key(query)]
            assert ours == truth.physical_offsets(line)[: line["maxNum"]], line
            asked += 1
            newer += any(phys >= end for phys in ours)
    assert asked > 20 and newer > 5


def test_force_reads_only_the_archive(real_store: Callable[[str], Path]) -> None:
    archive = archive_of("F", real_store)
    with both_of(archive, ReadPolicy.FORCE, 0.6) as queries:
        end = queries._archive.state.cursor.phys
        late = [
            record for record in records_of_log(archive) if FILTER.admits(record.topic) and record.uniq_key
        ]
        newest, oldest = late[-1], late[0]
        assert newest.physical_offset >= end > oldest.physical_offset
        for record, count in ((newest, 0), (oldest, 1)):
            query = KeyQuery(record.topic, str(record.uniq_key), KeyKind.UNIQUE, with_hidden=True)
            assert len(queries.by_key(query)) == count
            assert (queries.by_id(OffsetMsgId.parse(record.offset_msg_id)) is not None) == bool(count)
    with both_of(archive, ReadPolicy.NOT_IN_MEM, 0.6) as queries:
        for record in late[:: len(late) // 40]:
            found = queries.by_id(OffsetMsgId.parse(record.offset_msg_id))
            assert found is not None and found.data == record.data
            assert queries.by_id(OffsetMsgId.parse("00" * 8 + f"{record.physical_offset + 1:016x}")) is None


def test_what_the_broker_has_not_indexed_is_looked_for_in_its_log(
    real_store: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F's broker was killed before it had indexed its last messages; here it makes no index files at all."""
    archive = archive_of("F", real_store)
    store = tmp_path / "store"
    shutil.copytree(archive.directory / "store", store)
    shutil.rmtree(store / "index")
    records = [r for r in records_of_log(archive) if r.topic == "t_k_four" and r.uniq_key]
    with both_of(archive, ReadPolicy.NOT_IN_DISK, 0.6, store) as queries:
        for record in (records[0], records[-150], records[-1]):
            query = KeyQuery(record.topic, str(record.uniq_key), KeyKind.UNIQUE)
            assert [message.data for message in queries.by_key(query)] == [record.data]
        assert not caplog.records
        monkeypatch.setattr("fetcher.queries.broker_files_lookup.TAIL_BYTES_MAX", 10_000)
        query = KeyQuery(records[-1].topic, str(records[-1].uniq_key), KeyKind.UNIQUE)
        assert queries.by_key(query) == []
        assert "only 10000 bytes from there on are searched" in caplog.text


def test_what_the_archive_hides_the_broker_s_files_do_not_show(real_store: Callable[[str], Path]) -> None:
    """A deleted topic is still in the commitlog and in the index files."""
    archive = archive_of("F", real_store)
    hidden = {key.topic for key, row in archive.state.queues() if row["flags"] & 1}
    lines = [line for line in archive.truth("query_message") if line["topic"] in hidden]
    with both_of(archive, ReadPolicy.NOT_IN_DISK, 1) as queries:
        for line in lines:
            query = KeyQuery(line["topic"], line["key"], KeyKind.ANY)
            shown = queries._archive.by_key(query).messages
            assert [m.data for m in queries.by_key(query)] == [m.data for m in shown]


def test_an_index_that_lies_answers_with_nothing_wrong(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """Items that name other records, places without one, and places beyond the log."""
    archive = archive_of("F", real_store)
    store = tmp_path / "store"
    shutil.copytree(archive.directory / "store", store)
    slots = int(conf_of(archive.directory).properties["maxHashSlotNum"])
    record = [r for r in records_of_log(archive) if r.topic == "t_k_four" and r.uniq_key][700]
    wanted = broker_hash(record.topic, str(record.uniq_key))
    query = KeyQuery(record.topic, str(record.uniq_key), KeyKind.UNIQUE)
    with BrokerIndex(store / "index", slots) as index:
        (place,) = [place for place, _ in index.files[0].chain(wanted)]
    assert place == record.physical_offset
    path = min((store / "index").iterdir())
    whole = path.read_bytes()
    item = whole.index(wanted.to_bytes(4, "big") + place.to_bytes(8, "big"), HEADER_BYTES + 4 * slots)
    for lie in (place + 1, place + len(record.data), 0, 1 << 50, (1 << 63) - 1, (1 << 64) - 5):
        path.write_bytes(whole[: item + 4] + lie.to_bytes(8, "big") + whole[item + 12 :])
        with both_of(archive, ReadPolicy.DISABLE, 1, store) as queries:
            assert queries.by_key(query) == []
        with both_of(archive, ReadPolicy.NOT_IN_DISK, 1, store) as queries:
            assert [message.data for message in queries.by_key(query)] == [record.data]
    path.write_bytes(whole[:36] + b"\xff\xff\xff\xff" + whole[40:])
    with (
        both_of(archive, ReadPolicy.DISABLE, 1, store) as queries,
        pytest.raises(CorruptionError, match=path.name),
    ):
        queries.by_key(query)
    shutil.rmtree(store / "index")
    with both_of(archive, ReadPolicy.NOT_IN_DISK, 1, store) as queries:
        assert [message.data for message in queries.by_key(query)] == [record.data]


def test_an_index_file_being_written_shows_what_its_slots_lead_to(real_store: Callable[[str], Path]) -> None:
    """The broker counts an item in the header last: a reader that believes the header would lose the whole chain."""
    archive = archive_of("B", real_store)
    slots = int(conf_of(archive.directory).properties["maxHashSlotNum"])
    with BrokerIndex(archive.directory / "store" / "index", slots) as index:
        file = index.files[-1]
        wanted = broker_hash("t_keys", "AaAa")
        before = list(file.chain(wanted))
        assert len(before) > 10
        file.header = file.header._replace(item_count=2)
        assert list(file.chain(wanted)) == before
        assert list(file.matches(wanted, 0, 1 << 62)) == []


def test_a_place_that_both_sides_show_is_one_message(real_store: Callable[[str], Path]) -> None:
    archive = archive_of("F", real_store)
    with ArchiveQueries(archive.store, archive.state) as queries:
        record = next(r for r in records_of_log(archive) if r.topic == "t_k_four" and r.uniq_key)
        found = queries.by_id(OffsetMsgId.parse(record.offset_msg_id))
    assert found is not None
    again = replace(found, queue_offset=found.queue_offset)
    assert merged([found], [again], 5) == [found]
    assert merged([], [again], 5) == [again]
    assert merged([found], [again], 0) == []


def test_the_sizes_of_index_files_must_be_known(real_store: Callable[[str], Path]) -> None:
    with (
        open_broker_store(real_store("F") / "store") as store,
        pytest.raises(UsageError, match="do not have 5000000 slots") as refused,
    ):
        BrokerSideQueries(store)
    assert "broker.conf" in refused.value.hint


def test_the_command_finds_what_is_not_archived_yet(
    real_store: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = real_store("F")
    backfill(directory / "store", FileStore(tmp_path), settings=SMALL)
    for path in sorted((tmp_path / archive_prefix(CLUSTER, BROKER) / "catalog").iterdir())[:3]:
        path.unlink()  # commits of the newest messages
    conf = tmp_path / "broker.conf"
    lines = (directory / "broker.conf").read_text().splitlines(keepends=True)
    conf.write_text("".join(line for line in lines if not line.startswith("storePath")))
    archive = archive_of("F", real_store)
    newest = [r for r in records_of_log(archive) if FILTER.admits(r.topic) and r.uniq_key][-1]
    command = ["query", f"file://{tmp_path}", "--topic", newest.topic]
    beside = ["--store", str(directory / "store"), "--broker-conf", str(conf)]
    for what in (["--unique-key", str(newest.uniq_key)], ["--id", newest.offset_msg_id]):
        assert main([*command, *what]) == 3
        capsys.readouterr()
        assert main([*command, *what, *beside]) == 0
        assert json.loads(capsys.readouterr().out)["commitLogOffset"] == newest.physical_offset
    assert main([*command, "--unique-key", "x", "--store", str(directory / "store")]) == 2
    assert "broker.conf" in capsys.readouterr().err

"""`tiered restore`: the store has what the archive shows, an interrupted one continues, and the archive continues."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import rocketmq_tiered
from rocketmq_tiered.cli import restore as restore_command
from rocketmq_tiered.maintenance.restore.records import RecordWriter
from rocketmq_tiered.maintenance.restore.selection import RestoreSelection, ShownQueue, restored_configuration
from tests.end_to_end.offloading import SMALL, backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.maintenance.keyed_scene import KEYED, LIGHT, Table
from tests.maintenance.restored import FILE_BYTES, archived, expected, found, written
from tiered.catalog.broker_facts import BrokerFacts
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.restored_check import RESTORED
from tiered.clock import Clock
from tiered.formats.record import decode_record
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

Run = Callable[..., tuple[int, str, str]]
CONF = f"mappedFileSizeCommitLog={FILE_BYTES}\nmappedFileSizeConsumeQueue=1000\n"


class Place:
    """An archive and a broker.conf below a directory."""

    def __init__(self, run: Run, directory: Path) -> None:
        self.run, self.directory = run, directory
        self.url = f"file://{directory}/archive"
        self.store = directory / "restored"
        (directory / "broker.conf").write_text(CONF)

    def restore(self, *arguments: object, code: int = 0) -> Any:
        """What the command says."""
        conf = ("--broker-conf", self.directory / "broker.conf")
        got, out, err = self.run("restore", self.url, self.store, "--json", *conf, *arguments)
        assert got == code, err
        return json.loads(out) if code == 0 else err

    def continued(self, store: Path, *arguments: object) -> tuple[int, str]:
        """What `tiered backfill` of ``store`` into the archive says."""
        code, out, err = self.run(
            "backfill", store, self.url, "--cluster", "FxCluster", "--broker", "fx-a", *arguments
        )
        return code, out + err


def visible_messages(url: str) -> int:
    """How many messages the archive shows."""
    with rocketmq_tiered.open(url) as archive:
        return sum(queue.messages for queue in archive.queues())


@pytest.fixture
def place(run: Run, tmp_path: Path) -> Place:
    return Place(run, tmp_path)


@pytest.mark.parametrize("queues", ["file", "rocksdb", "both"])
def test_every_archived_record_is_at_its_place_with_its_unit(place: Place, queues: str) -> None:
    store = written(place.directory / "store")
    archived(store, place.directory / "archive")
    said = place.restore("--consume-queue", queues)
    assert said["messages"] == 600 and said["continuesAt"] == store.phys
    assert found(place.store) == {
        queue: (0, max(records) + 1, records) for queue, records in expected(store).items()
    }
    assert not (place.directory / "restored.restoring").exists()
    assert said["brokerConf"]["mappedFileSizeCommitLog"] == str(FILE_BYTES)


def test_the_archive_continues_where_the_end_of_the_log_was_not_archived(place: Place) -> None:
    archived(written(place.directory / "store"), place.directory / "archive")
    place.restore()
    code, said = place.continued(place.store)
    assert (code, "nothing to do" in said) == (0, True), said
    (place.store / RESTORED).unlink()
    code, said = place.continued(place.store)
    assert code == 0 and "new log history" in said, said  # all archived records are in the log
    assert visible_messages(place.url) == 600


def test_other_bytes_than_those_that_were_restored_begin_a_log_history(place: Place) -> None:
    store = written(place.directory / "store")
    archived(store, place.directory / "archive")
    place.restore()
    last = max((place.store / "commitlog").iterdir())
    with last.open("r+b") as file:
        file.seek(store.phys % FILE_BYTES - 2_000)
        file.write(b"x")
    code, said = place.continued(place.store)
    assert code == 0 and "new log history" in said, said
    assert visible_messages(place.url) == 600


def test_an_interrupted_restore_continues_with_its_version(place: Place) -> None:
    store = written(place.directory / "store", messages=2_000, body_bytes=3_000)
    archived(store, place.directory / "archive")
    copy, calls = RecordWriter._copy, []

    def interrupted(self: RecordWriter, runs: Any) -> None:
        calls.append(runs)
        if len(calls) == 3:
            raise KeyboardInterrupt
        copy(self, runs)

    with (
        mock.patch.object(RecordWriter, "_copy", interrupted),
        mock.patch("rocketmq_tiered.maintenance.restore.restoring.SYNC_INTERVAL_S", -1),
    ):
        place.restore(code=130)
    assert not place.store.exists()
    notes = json.loads((place.directory / "restored.restoring" / "tiered-restoring.json").read_bytes())
    assert notes["objects"] == 2
    assert "belongs to an interrupted restore of something else" in place.restore(
        "--layout", "compact", code=2
    )
    calls.clear()
    with mock.patch.object(RecordWriter, "_copy", lambda self, runs: (calls.append(runs), copy(self, runs))):
        place.restore()
    assert found(place.store) == {
        queue: (0, max(records) + 1, records) for queue, records in expected(store).items()
    }


def test_other_topics_keep_their_offsets(place: Place) -> None:
    store = written(place.directory / "store")
    for number in range(400):
        store.put("t9", 0, bytes(300), later_ms=1000 + number)
    archived(store, place.directory / "archive")
    said = place.restore("--topics", "t9")
    kept = expected(store)
    assert said["messages"] == 400 and said["endedQueues"] == 6
    assert found(place.store) == {
        queue: (0, max(records) + 1, records)
        if queue[0] == "t9"
        else (max(records) + 1, max(records) + 1, {})
        for queue, records in kept.items()
    }
    assert place.continued(place.store)[0] == 0


def test_messages_since_a_time(place: Place) -> None:
    store = written(place.directory / "store", messages=2_000)
    archived(store, place.directory / "archive")
    all_records = expected(store)
    stored = {
        queue: {offset: int.from_bytes(record[56:64], "big") for offset, record in records.items()}
        for queue, records in all_records.items()
    }
    cut = max(times[offset] for times in stored.values() for offset in times if offset == 200)
    place.restore("--since", str(cut))
    assert found(place.store) == {
        queue: (
            min(offset for offset in records if stored[queue][offset] >= cut),
            max(records) + 1,
            {offset: record for offset, record in records.items() if stored[queue][offset] >= cut},
        )
        for queue, records in all_records.items()
    }


def test_a_gap_needs_bytes_below_the_log(place: Place) -> None:
    store = written(place.directory / "store", gap_at=20)
    archived(store, place.directory / "archive")
    assert "--layout compact" in place.restore(code=2)
    assert not place.store.exists()
    assert place.restore("--layout", "compact")["gapOffsets"] == 10
    shown = found(place.store)
    for queue, records in expected(store).items():
        least, end, got = shown[queue]
        assert (least, end, sorted(got)) == (0, max(records) + 1, sorted(records))
        assert all(got[offset][36:] == records[offset][36:] for offset in records)


def test_a_compact_log_ends_where_the_archive_does(place: Place) -> None:
    store = written(place.directory / "store", messages=900)
    for _ in range(60):
        store.put("rmq_sys_trace", 0, bytes(3_000))
    for number in range(300):
        store.put("t1", 0, bytes(300), later_ms=1000 + number)
    archived(store, place.directory / "archive")
    said = place.restore("--layout", "compact")
    assert said["continuesArchive"] and said["continuesAt"] == store.phys
    code, text = place.continued(place.store)
    assert code == 0 and "nothing to do" in text
    assert {queue: (least, end) for queue, (least, end, _) in found(place.store).items()} == {
        queue: (0, max(records) + 1) for queue, records in expected(store).items()
    }


def test_what_is_refused_in_one_line(place: Place) -> None:
    archived(written(place.directory / "store"), place.directory / "archive")
    place.store.mkdir()
    (place.store / "file").touch()
    assert "is not empty" in place.restore(code=2)
    (place.store / "file").unlink()
    (place.directory / "restored.restoring").mkdir()
    (place.directory / "restored.restoring" / "file").touch()
    assert "has files that tiered restore did not write; move it away" in place.restore(code=2)
    (place.directory / "restored.restoring" / "file").unlink()
    (place.directory / "broker.conf").write_text("mappedFileSizeCommitLog=30000\n")
    assert "would cross the end of a commitlog file of 30000 bytes" in place.restore(code=2)
    (place.directory / "broker.conf").write_text("mappedFileSizeCommitLog=1g\n")
    assert "mappedFileSizeCommitLog = 1g is not a whole number" in place.restore(code=2)
    (place.directory / "broker.conf").write_text(CONF)
    assert "belongs to an interrupted restore of something else" in place.restore(code=2)
    shutil.rmtree(place.directory / "restored.restoring")
    archive = FileStore(place.directory / "archive" / "FxCluster" / "fx-a")
    writer = CatalogWriter(
        archive,
        cluster="FxCluster",
        broker="fx-a",
        instance="i",
        kind="run",
        host="h",
        clock=Clock(wall_ms=lambda: 1),
    )
    writer.load()
    writer.claim(take_over=True)
    refusal = place.restore(code=2)
    assert "i on h committed" in refusal and f"--at-version {load(archive).version}" in refusal


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
@pytest.mark.parametrize("plant", ["directory", "writable", "link", "file"])
def test_a_directory_that_another_user_prepared_is_not_filled(place: Place, plant: str) -> None:
    archived(written(place.directory / "store"), place.directory / "archive")
    planted, elsewhere = place.directory / "restored.restoring", place.directory / "elsewhere"
    elsewhere.mkdir()
    if plant == "link":
        planted.symlink_to(elsewhere)
    else:
        planted.mkdir()
        planted.chmod(0o777 if plant == "writable" else 0o700)
    if plant == "file":
        (planted / "commitlog").touch()
        planted /= "commitlog"
    if plant != "writable":
        os.lchown(planted, 65534, 65534)
    assert "another STORE" in place.restore(code=2)
    assert not list(elsewhere.iterdir()) and not place.store.exists()


def test_an_archive_without_sizes_of_files_requests_them(place: Place) -> None:
    archived(written(place.directory / "store"), place.directory / "archive")
    with mock.patch.object(restore_command, "recorded_facts", lambda state: BrokerFacts()):
        code, _, error = place.run("restore", place.url, place.store)
    assert code == 2 and "--broker-conf FILE" in error
    code, out, _ = place.run("restore", place.url, place.store)
    assert code == 0 and f"mappedFileSizeCommitLog={FILE_BYTES}" in out, "recorded by the archive"


def test_an_earlier_version_is_an_older_copy(place: Place) -> None:
    store = written(place.directory / "store")
    archived(store, place.directory / "archive")
    before = {queue: dict(records) for queue, records in expected(store).items()}
    version = load(FileStore(place.directory / "archive" / "FxCluster" / "fx-a")).version
    for number in range(50):
        store.put("t1", 0, bytes(1_000), later_ms=1_000 + number)
    archived(store, place.directory / "archive")
    assert not place.restore("--at-version", version, "--index")["continuesArchive"]
    assert {queue: end for queue, (_, end, _) in found(place.store).items()} == {
        queue: max(records) + 1 for queue, records in before.items()
    }
    code, text = place.continued(place.store)
    assert code == 2 and "older copy" in text


def test_clamped_offsets_and_lmqs() -> None:
    queues = {
        QueueKey("t", 0, 0): ShownQueue(0, 10, False, False, True),
        QueueKey("%LMQ%a", 0, 0): ShownQueue(0, 5, False, True, True),
    }
    tables = {
        "topics": {
            "t": {"topicName": "t", "attributes": {"cleanup.policy": "COMPACTION"}},
            "b": {"topicName": "b", "attributes": {"queue.type": "BatchCQ"}},
        },
        "consumer_offsets": {"t@g": {"0": 12, "1": 3}, "t@h": {"0": 9}, "%LMQ%a@g": {"0": 7}},
    }
    made = restored_configuration(
        tables, RestoreSelection(queues), 1, keeps_compaction=False, may_batch=False
    )
    assert [(one.group, one.queue_id, one.offset, one.end_offset) for one in made.clamped] == [
        ("g", 0, 7, 5),
        ("g", 0, 12, 10),
        ("g", 1, 3, 0),
    ]
    lmq = made.documents["lmqConsumerOffset.json"]
    assert lmq["lmqOffsetTable"] == {"%LMQ%a@g": 5}
    assert lmq["offsetTable"] == {"t@g": {"0": 10, "1": 0}, "t@h": {"0": 9}}
    assert made.documents["topics.json"]["topicConfigTable"] == {"t": {"topicName": "t", "attributes": {}}}
    assert made.plain_topics == ["t"]
    without = restored_configuration({}, RestoreSelection(queues), 1, keeps_compaction=False, may_batch=True)
    table = without.documents["topics.json"]["topicConfigTable"]
    assert table == {"t": {"topicName": "t", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}}


def test_an_archive_after_a_diverged_log_compaction_and_expiry(place: Place) -> None:
    store = written(place.directory / "store", messages=3_000, body_bytes=1_000, begin_file=2)
    copy = place.directory / "copy"
    shutil.copytree(store.path, copy)
    diverged = WrittenStore(copy, store.phys)
    diverged.records = {queue: dict(records) for queue, records in store.records.items()}
    for which, count in ((store, 300), (diverged, 500)):
        for number in range(count):
            which.put(f"t{number % 3}", 0, bytes(200 + count), later_ms=4_000 + number)
        archive = FileStore(place.directory / "archive")
        backfill(which.path, archive, settings=SMALL, replace_log=True)
    assert place.run("compact", place.url, "--apply", "--older-than", "0")[0] == 0
    rules = place.directory / "rules.toml"
    rules.write_text('[[topics.rules]]\npattern = "t1"\nttl = "1h"\n[retention]\nmin_archived = "1ms"\n')
    code, out, err = place.run("expire", place.url, "--rules", rules, "--apply", "--yes")
    assert code == 0, out + err
    assert place.run("gc", place.url, "--apply", "--grace", "0", "--set", "gc.diverged_grace_ms=0")[0] == 0
    place.restore()
    assert found(place.store) == {
        queue: (end, end, {}) if queue[0] == "t1" else (0, end, records)
        for queue, records in expected(diverged).items()
        for end in [max(records) + 1]
    }
    code, said = place.continued(place.store)
    assert code == 0 and "nothing to do" in said
    assert place.run("verify", place.url, "--full")[0] == 0


def test_offsets_that_key_compaction_dropped_are_passed(place: Place) -> None:
    store = written(place.directory / "store", begin_file=2)
    for number in range(5_000):
        store.put("state", 0, bytes(500), keys=f"k{number % 7}", later_ms=1_000 + number)
    archived(store, place.directory / "archive")
    rule = ("--set", 'topics.rules=[{"pattern": "state", "key_compaction": "on"}]')
    code, out, err = place.run(
        "compact-keys", place.url, "--apply", "--set", "key_compaction.min_age_ms=0", *rule
    )
    assert code == 0, out + err
    said = place.restore()
    kept = expected(store)
    shown = found(place.store)
    least, end, records = shown.pop(("state", 0))
    assert end == 5_000 and 7 < len(records) < 3_000 and said["gapOffsets"] == end - least - len(records)
    assert all(kept["state", 0][offset] == record for offset, record in records.items())
    del kept["state", 0]
    assert shown == {queue: (0, max(records) + 1, records) for queue, records in kept.items()}
    assert place.continued(place.store)[0] == 0


def test_lmq_entries_of_messages_that_key_compaction_dropped_are_passed(place: Place) -> None:
    table = Table(
        place.directory / "spool",
        store=PrefixedStore(FileStore(place.directory / "archive"), "cluster/broker"),
    )
    table.write(30, keys=60)
    assert table.compact().rounds
    left = table.check()
    place.restore("--layout", "compact")
    shown = found(place.store)
    alive = {
        row.offset for row in table.owner.truth[LIGHT].rows if decode_record(row.record).queue_offset in left
    }
    assert 3 < len(alive) < len(table.owner.truth[LIGHT].rows)
    records = shown[LIGHT.topic, 0][2]
    assert set(records) == alive and set(shown[KEYED.topic, 0][2]) == set(left)
    assert {decode_record(record).topic for record in records.values()} == {KEYED.topic}


def test_a_compact_log_has_a_place_for_lmq_entries_of_messages_that_expired(place: Place) -> None:
    """Their gap shows only when the queue is written."""
    store = WrittenStore(place.directory / "store")
    for number in range(6):
        more = {"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": str(number)}
        topic = "kept" if number in (0, 5) else "old"
        store.put(topic, 0, b"body", more=more)
        size = store.phys - (phys := int.from_bytes(list(store.records[topic, 0].values())[-1][28:36], "big"))
        store.put_unit("%LMQ%a", 0, number, struct.pack(">qiq", phys, size, 0))
    archived(store, place.directory / "archive")
    rules = place.directory / "rules.toml"
    rules.write_text('[[topics.rules]]\npattern = "old"\nttl = "1h"\n[retention]\nmin_archived = "1ms"\n')
    assert place.run("expire", place.url, "--rules", rules, "--apply", "--yes")[0] == 0
    assert "--layout compact" in place.restore(code=2)
    place.restore("--layout", "compact")
    assert sorted(found(place.store)["%LMQ%a", 0][2]) == [0, 5]


def test_files_of_the_usual_size_are_sparse(place: Place) -> None:
    store = written(place.directory / "store", gap_at=20)
    archived(store, place.directory / "archive")
    (place.directory / "broker.conf").write_text("")
    place.restore("--layout", "compact")
    files = sorted((place.store / "commitlog").iterdir())
    assert [path.stat().st_size for path in files] == [1 << 30, 1 << 30]
    assert sum(path.stat().st_blocks for path in files) * 512 < 1 << 21
    shown = found(place.store)
    assert {queue: sorted(records) for queue, (_, _, records) in shown.items()} == {
        queue: sorted(records) for queue, records in expected(store).items()
    }

"""Key compaction: the latest message of each key stays, as a dict of all messages says, whatever happens in between.

The begin of a compacted queue comes from a broker's compaction log, and the view is the one of all messages.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocketmq_tiered.maintenance import key_rounds
from rocketmq_tiered.maintenance.key_begins import Copying, missing_begins
from rocketmq_tiered.maintenance.key_rounds import KeyedQueue, KeyPass, keyed_queues, read_queues
from tests.archive.archive_builder import ArchiveBuilder, Sent, Stored, _Queue
from tests.faults.crashing_store import CrashError, CrashingStore
from tests.fetcher.reading_fakes import plain_fetcher
from tests.kernels.record_builder import Message, encode, properties
from tests.maintenance.compaction_scene import EVERYTHING
from tests.maintenance.keyed_scene import KEYED, OTHER, Table, pull
from tests.sweeps import examples
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import RunIndex
from tiered.catalog.requirements import histories_of
from tiered.clock import Clock
from tiered.errors import UnavailableError, UsageError
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import RemotingCommand, RequestCode


def test_the_latest_message_of_each_key_stays(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.write(60)
    before = table.check()
    (queue,) = keyed_queues(
        RunIndex(table.store),
        load(table.store),
        lambda topic: topic == "keyed",
        before_version=EVERYTHING,
        runs_max=1 << 20,
    )
    assert isinstance(queue, KeyedQueue)
    dry = table.compact(apply=False)
    assert not dry.is_applied and table.check() == before
    done = table.compact()
    assert done.figures == dry.figures and done.rounds == 1
    found = table.check()
    latest = {key: at for at, (key, _) in enumerate(table.sent[: queue.cut]) if key}
    kept = {at for at in latest.values() if table.sent[at][1]}
    assert set(found) == kept | set(range(queue.cut, len(table.sent)))
    assert (done.figures.messages, done.figures.new_messages) == (queue.cut, len(kept))
    assert done.figures.tombstones == len(latest) - len(kept)
    assert table.compact().rounds == 0, "nothing is new"
    state = load(table.store)
    row = state.queue(KEYED)
    assert row is not None and int(row["min_queue_offset"]) == 0
    assert pull(plain_fetcher(table.store), 0).min_offset == min(found)
    other = {row.offset for row in table.owner.truth[OTHER].rows}
    assert len(other) == int(state.queue(OTHER)["row_count"])  # type: ignore[index]


def test_keys_of_many_queues_are_read_by_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue read with others keeps the messages that it keeps alone; queues share the keys of some messages."""

    class Counting(MemoryStore):
        gets = 0

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            self.gets += 1
            return super().get_range(key, offset, length)

    queues, chance = [QueueKey("keyed", number, 0) for number in range(40)], random.Random(5)
    store = Counting()
    builder = ArchiveBuilder(store)
    for _ in range(4):
        sent = [(queue, f"k{chance.randrange(3)}") for queue in queues for _ in range(chance.randint(1, 4))]
        builder.commit([Sent(queue, b"body", keys=[key]) for queue, key in sent])
    state = load(store)
    found = keyed_queues(RunIndex(store), state, lambda _: True, before_version=EVERYTHING, runs_max=1 << 20)
    keyed = [one for one in found if isinstance(one, KeyedQueue)]
    assert len(keyed) == len(queues)
    results = []
    for row_bytes in (1, 1 << 30):  # all together, then one by one
        monkeypatch.setattr(key_rounds, "ROW_BYTES", row_bytes)
        read, before = KeyPass(histories_of(state)), store.gets
        read_queues(store, keyed, read, tmp_path, 1 << 20, keeps_keyless=False)
        masks = {queue: kept.mask(np.arange(20)).tolist() for queue, kept in read.kept.items()}
        results.append((masks, read.figures, store.gets - before))
    (together, figures, requests), (alone, same_figures, more_requests) = results
    assert together == alone and figures == same_figures
    assert figures.messages > figures.new_messages
    assert requests <= 2 * 3 < more_requests, "the newest object of four stays"


def test_messages_without_a_key_may_stay(tmp_path: Path) -> None:
    table = Table(tmp_path)
    own = replace(table.settings.key_compaction, keyless="keep")
    table.settings = replace(table.settings, key_compaction=own)
    table.write(60)
    table.compact()
    found = table.check()
    assert {at for at, (key, _) in enumerate(table.sent) if not key} <= set(found)


def test_outputs_are_as_large_as_what_stays(tmp_path: Path) -> None:
    table = Table(tmp_path)
    compaction = replace(table.settings.compaction, object_bytes=6_000)
    table.settings = replace(table.settings, compaction=compaction)
    table.write(60, keys=20)
    done = table.compact()
    assert done.figures.bytes > 5 * 6_000 and done.figures.new_bytes < 6_000
    runs = RunIndex(table.store).runs_of(load(table.store), KEYED).runs
    assert (runs["kind"] == RunKind.SPARSE).sum() <= 2
    table.check()


def test_a_queue_of_deleted_keys_keeps_a_row(tmp_path: Path) -> None:
    """A run has rows: where nothing stays, the last message does."""
    table = Table(tmp_path)
    table.write(30, tombstones=1.0)
    table.write(2, tombstones=0.0)
    table.compact()
    table.check()


def test_a_deleted_key_stays_deleted_where_an_emptied_run_keeps_a_row(tmp_path: Path) -> None:
    """Beside a gap nothing can reach over the run of the old value, so its row stays; the tombstone does too."""
    table = Table(tmp_path)
    for offset, key, body in ((0, "k", b"old"), (9, "k", b""), (10, "other", b"new")):
        table.sent += [*[("", b"")] * (offset - len(table.sent)), (key, body)]
        table.owner.commit([Sent(KEYED, body, keys=[key], offset=offset)])
    for _ in range(2):
        table.compact()
        assert table.check().keys() == {0, 9, 10}


@settings(max_examples=examples(5), deadline=None)
@example(seed=0, acts=[*["write"] * 5, "compact", "expire", "join"])  # a hole behind a plain run
@given(
    st.integers(0, 10**6),
    st.lists(
        st.sampled_from(["write", "compact", "join", "collect", "expire", "cut_log", "restart"]), max_size=12
    ),
)
def test_any_interleaving_gives_the_dict(
    tmp_path_factory: pytest.TempPathFactory, seed: int, acts: list[str]
) -> None:
    table = Table(tmp_path_factory.mktemp("spool"), seed)
    table.write(20)
    for act in [*acts, "compact", "collect"]:
        if act == "write":
            table.write(table.random.randint(1, 15), keys=table.random.choice([2, 12, 60]))
        else:
            getattr(table, act)()
        table.check()


BEGIN = 40


class Broker:
    """Answers as a broker with a compaction log, which has compacted all below ``cut``."""

    def __init__(self, table: Table) -> None:
        self.table, self.cut = table, 0
        self.records: dict[int, bytes] = {}
        self.before_pull: Callable[[int], object] = lambda offset: None

    def call(self, code: int, fields: dict[str, str]) -> RemotingCommand:
        if code == RequestCode.GET_MAX_OFFSET:
            return RemotingCommand(0, 0, ext_fields={"offset": str(len(self.table.sent))})
        offset = int(fields["queueOffset"])
        self.before_pull(offset)
        latest = {key: at for at, (key, _) in enumerate(self.table.sent[: self.cut]) if key}
        kept = [at for at in latest.values() if self.table.sent[at][1]]
        kept += [at for at in range(self.cut, len(self.table.sent)) if self.table.sent[at][0]]
        found = sorted(at for at in kept if at >= offset)[:7]
        if not found:
            return RemotingCommand(19, 0, ext_fields={"nextBeginOffset": str(offset)})
        body = b"".join([self.record(at) for at in found])
        return RemotingCommand(0, 0, ext_fields={"nextBeginOffset": str(found[-1] + 1)}, body=body)

    def record(self, at: int) -> bytes:
        if at not in self.records:
            key, body = self.table.sent[at]
            message = Message(
                topic=KEYED.topic.encode(),
                queue_offset=at,
                body=body,
                properties=properties((b"KEYS", key.encode())),
                store_timestamp=1_600_000_000_000 + at,
            )
            self.records[at] = encode(message, 77 * at)
        return self.records[at]

    def broker_config(self) -> dict[str, str]:
        return {"brokerClusterName": "cluster", "brokerName": "broker"}

    def topics(self) -> dict[str, Any]:
        return {KEYED.topic: {"attributes": {"cleanup.policy": "COMPACTION"}}}


def begun_late(spool: Path, seed: int = 1) -> tuple[Table, Broker]:
    """An archive that begins at offset 40 of the queue."""
    table = Table(spool, seed)
    for _ in range(BEGIN):
        body = b"" if table.random.random() < 0.2 else table.random.randbytes(60)
        table.sent.append((f"k{table.random.randrange(30)}", body))
    table.owner.truth[KEYED] = _Queue(end=BEGIN)
    table.floor = BEGIN
    return table, Broker(table)


def copy(table: Table, broker: Broker, store: Any = None) -> int:
    """Copy what is missing, which the table then expects; how many messages that were."""
    store = store or table.store
    maintenance = MaintenanceCommit.opened(store, load(store), "test", Clock(wall_ms=store.clock_ms))
    codec, age_ms = BlockCodec(block_bytes=600), table.settings.key_compaction.min_age_ms
    copying = Copying(maintenance, broker, table.spool, 1 << 20, codec, age_ms)  # type: ignore[arg-type]
    table.ends = table.ends[-1:]  # what replaced a copied message must stay
    report = copying.all(
        "broker:10911", lambda topic: topic == KEYED.topic, lambda done, all_: None, apply=True
    )
    if report.figures.new_messages:
        table.floor = 0
        rows = table.owner.truth[KEYED].rows
        rows[:0] = [Stored(at, 1, broker.record(at), 0, 0, 0) for at in range(BEGIN) if table.sent[at][0]]
    return report.figures.new_messages


@pytest.mark.parametrize("seed", range(4))
def test_the_view_is_that_of_all_messages(tmp_path: Path, seed: int) -> None:
    table, broker = begun_late(tmp_path, seed)
    table.write(12, keys=20)
    table.compact()
    broker.cut = table.random.randrange(BEGIN + 10)
    assert [begin.end for begin in missing_begins(load(table.store), lambda topic: True)] == [BEGIN]
    assert copy(table, broker) > 3
    found = table.check()
    row = load(table.store).queue(KEYED)
    assert row is not None and int(row["min_queue_offset"]) == 0 and min(found) < BEGIN
    assert copy(table, broker) == 0, "the begin is archived"
    rounds = 0
    for act in ("write", "compact", "join", "collect", "write", "restart", "write", "compact", "collect"):
        if act == "write":
            table.write(9, keys=25)
        else:
            done = getattr(table, act)()
            rounds += done.rounds if act == "compact" else 0
        table.check()
    assert rounds and table.compact().rounds == 0
    kinds = RunIndex(table.store).runs_of(load(table.store), KEYED).runs
    assert (kinds["kind"] == RunKind.SPARSE).sum() > 1 and kinds["min_phys"][0] < 0 <= kinds["min_phys"][1]


def test_a_tombstone_that_leaves_the_broker_while_copying_counts(tmp_path: Path) -> None:
    table, broker = begun_late(tmp_path)
    table.write(12, keys=25, tombstones=0.5)
    broker.before_pull = lambda offset: setattr(broker, "cut", len(table.sent)) if offset == 14 else None
    copy(table, broker)
    table.check()


def test_rounds_of_the_archive_while_copying_void_the_copy(tmp_path: Path) -> None:
    table, broker = begun_late(tmp_path)
    table.write(12)
    broker.before_pull = lambda offset: table.compact() if offset == 0 else None
    with pytest.raises(UnavailableError, match="changed while"):
        copy(table, broker)
    broker.before_pull = lambda offset: None
    assert copy(table, broker)
    table.check()


def test_a_kill_at_any_request_leaves_an_archive_that_the_next_copy_finishes(tmp_path: Path) -> None:
    step, done = 1, False
    while not done:
        table, broker = begun_late(tmp_path)
        table.write(6)
        try:
            copy(table, broker, CrashingStore(table.store, step, after_effect=step % 2 == 0))
            done = True
        except CrashError:
            table.check() if missing_begins(load(table.store), lambda topic: True) else None
        copy(table, broker)
        if not table.floor:
            table.check()
        table.collect()
        assert verify_archive(table.store, depth="full").anomalies == []
        step += 1


def test_young_messages_replace_nothing_that_is_copied(tmp_path: Path) -> None:
    """The log may lose them."""
    table, broker = begun_late(tmp_path)
    table.write(6, keys=40)
    ends = list(table.ends)
    young = replace(table.settings.key_compaction, min_age_ms=10**15)
    table.settings = replace(table.settings, key_compaction=young)
    table.write(12, keys=40)
    assert copy(table, broker)
    table.check()
    table.ends = [*ends, *table.ends]
    table.random.seed(1)
    table.cut_log()
    table.check()


def test_a_queue_that_was_created_again_is_refused(tmp_path: Path) -> None:
    table, broker = begun_late(tmp_path)
    table.write(3)
    sent, table.sent = table.sent, table.sent[:7]
    with pytest.raises(UnavailableError, match="begins in the archive: it ends at offset 7"):
        copy(table, broker)
    table.sent = sent
    table.check()


def test_another_broker_is_refused(tmp_path: Path) -> None:
    table, broker = begun_late(tmp_path)
    table.write(3)
    broker.broker_config = lambda: {"brokerClusterName": "cluster", "brokerName": "other"}  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="is cluster/other, but the archive is of cluster/broker"):
        copy(table, broker)

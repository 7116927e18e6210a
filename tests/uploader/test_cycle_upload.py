"""Cycles in flight against a store that fails: what an abandoned attempt leaves behind, in requests and in memory."""

import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import pytest

from tests.kernels.record_builder import Message, build_log
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.clock import Clock
from tiered.errors import AccessDeniedError, ThrottledError, UnansweredError
from tiered.formats.segment import BlockCodec, EncodedSegment, encode_segment
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import scan_log
from tiered.model.tables import GapReason
from tiered.object_store.abandonment import current_abandonment
from tiered.object_store.interface import Body, ObjectStore, StoreOptions
from tiered.object_store.memory import MemoryStore
from tiered.object_store.s3 import S3Store
from tiered.settings.sections import ObjectStoreSettings
from uploader import cycle, cycle_builder
from uploader.attempts import AttemptPolicy
from uploader.broker_state_archive import BrokerStateArchive
from uploader.cycle_plan import CyclePlanner
from uploader.cycle_upload import CycleUploader, UploadContext
from uploader.double_buffer import DoubleBuffer
from uploader.header_check import HeaderCheck
from uploader.log_batch import DamagedRange, LogBatch, LogBatchPool
from uploader.queue_tails import QueueTails

FAR = 1 << 40
TIMEOUT_S = 20.0


class DataStore(MemoryStore):
    """Catalog PUTs pass; ``answer(key, nth)`` decides about the nth data PUT, from 1, before it takes effect."""

    def __init__(self, answer: Callable[[str, int], object]) -> None:
        super().__init__("memory://cycles")
        self._answer = answer
        self._count_lock = threading.Lock()
        self.data_keys: list[str] = []

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        if not key.startswith("catalog/"):
            with self._count_lock:
                self.data_keys.append(key)
                number = len(self.data_keys)
            self._answer(key, number)
        super().put_if_absent(key, body, timeout_s=timeout_s)


class Bench:
    """An uploader whose log is given to it; the builder runs where the test calls it, or in a thread."""

    def __init__(self, archive: ObjectStore, data: ObjectStore | None = None, *, threads: int = 2) -> None:
        self.table, self.tails = QueueTable(), QueueTails()
        self.writer = CatalogWriter(
            archive,
            cluster="c",
            broker="b",
            instance="i",
            kind="run",
            clock=Clock(wall_ms=lambda: 1_700_000_000_000),
        )
        self.writer.claim()
        self.pool = LogBatchPool(batch_bytes=1 << 20, count=4)
        self.closed: DoubleBuffer[LogBatch] = DoubleBuffer(capacity=4)
        self.context = UploadContext(
            archive=data or archive,
            writer=self.writer,
            planner=CyclePlanner(self.table, self.tails, split_bytes=1),
            header_check=HeaderCheck(self.table, lambda: None, CommitLog([])),
            tails=self.tails,
            pool=self.pool,
            codec=BlockCodec(),
            policy=AttemptPolicy(timeout_ms_min=200, timeout_ms_max=200, backoff_ms_first=1),
            cluster="c",
            broker="b",
            writer_name="i",
            clock=Clock(wall_ms=lambda: 1_700_000_000_000),
            jitter=lambda: 0.0,
            claim=lambda: None,
        )
        self.uploader = CycleUploader(
            self.context,
            self.closed,
            upload_threads=threads,
            extend=lambda _batch: False,
            state_archive=BrokerStateArchive(archive, dict),
        )
        self.phys = 0

    def close_batch(self, messages: Sequence[Message], *, is_damaged: bool = False) -> None:
        """What the dispatcher hands over."""
        batch = self.pool.try_acquire()
        assert batch is not None
        batch.reset(self.phys, 0)
        data = build_log(messages, self.phys)
        batch.arena[: len(data)] = np.frombuffer(data, np.uint8)
        scan_log(batch.arena, 0, len(data), self.phys, FAR, self.table, batch.columns, delay_levels_ms=None)
        self.table.admitted[:] = 1
        batch.extend(len(data), self.phys)
        batch.is_wanted = True
        if is_damaged:
            batch.to_phys += 100
            batch.damaged.append(DamagedRange(batch.to_phys - 100, batch.to_phys, "file", "test"))
        self.phys = batch.to_phys
        assert self.closed.try_put(batch)

    def build_until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, "never came true"
            self.uploader.builder.build_next(0.01)

    @contextmanager
    def committing(self) -> Iterator[threading.Event]:
        """A committer thread beside; the event tells it to end."""
        end = threading.Event()

        def commit() -> None:
            while not end.is_set():
                self.uploader.commit_next(0.02)

        thread = threading.Thread(target=commit)
        thread.start()
        try:
            yield end
        finally:
            end.set()
            self.uploader.close()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    @property
    def commits(self) -> int:
        return self.uploader.counters.commits


def queues(count: int, *, offset: int = 0, body_bytes: int = 100) -> list[Message]:
    return [Message(topic=b"t%03d" % i, queue_offset=offset, body=bytes(body_bytes)) for i in range(count)]


def test_nothing_of_an_abandoned_attempt_is_put_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """More objects than threads, the first unanswered: those still waiting for a thread are never begun."""
    monkeypatch.setattr(cycle, "PUT_GRACE_S", 0.0)

    def answer(key: str, number: int) -> None:
        if number == 1:
            raise UnansweredError("lost")
        if key.endswith("-1.so"):
            time.sleep(0.5)
            raise UnansweredError("stalled")

    store = DataStore(answer)
    bench = Bench(store)
    bench.close_batch(queues(12))
    with bench.committing():
        bench.build_until(lambda: bench.commits)
    assert bench.uploader.counters.attempts_abandoned == 12
    of_first = [key for key in store.data_keys if key.endswith("-1.so")]
    assert len(of_first) <= 3, "the others would queue up, and hold their memory, one attempt after another"
    assert len(store.data_keys) - len(of_first) == 12


def test_puts_beside_a_failed_one_are_abandoned_and_the_next_attempt_begins_at_once() -> None:
    """It does not wait for the slowest of them; the first failure is the one reported."""

    def answer(_key: str, number: int) -> None:
        abandonment, ended = current_abandonment(), threading.Event()
        assert abandonment is not None
        if number == 1:
            abandonment.begin(ended, ended.set)
            assert ended.wait(TIMEOUT_S), "stalled: it was not ended"
            raise UnansweredError("abandoned")
        if number == 2:
            time.sleep(0.1)
            raise UnansweredError("lost")

    bench = Bench(DataStore(answer))
    bench.close_batch(queues(2))
    with bench.committing():
        began_s = time.monotonic()
        bench.build_until(lambda: bench.commits)
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    assert bench.uploader.counters.last_error == "lost"


def test_of_an_abandoned_attempt_only_keys_that_may_exist_are_pending_deletions() -> None:
    def answer(key: str, number: int) -> None:
        if number == 2:
            raise UnansweredError("lost")
        if number == 3:
            raise ThrottledError("busy")

    store = DataStore(answer)
    bench = Bench(store, threads=1)
    bench.close_batch(queues(4))
    with bench.committing():
        bench.build_until(lambda: bench.commits)
    stored, lost, refused, *_ = store.data_keys  # the refused one is of this attempt or the next
    garbage = set(bench.writer.state.pending_deletions)
    assert {stored, lost} <= garbage <= set(store.data_keys)
    assert refused not in garbage


@contextmanager
def without_collector() -> Iterator[None]:
    """Memory is free when the last reference goes, or not at all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Alive:
    """How many encoded objects were alive at each encoding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._references: list[weakref.ref[EncodedSegment]] = []
        self.at_encoding: list[int] = []
        monkeypatch.setattr(cycle_builder, "encode_segment", self._encode)

    def _encode(self, *arguments: object) -> EncodedSegment:
        self.at_encoding.append(sum(reference() is not None for reference in self._references))
        segment = encode_segment(*arguments)  # type: ignore[arg-type]
        self._references.append(weakref.ref(segment))
        return segment


def test_memory_of_an_abandoned_attempt_is_free_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(_key: str, number: int) -> None:
        if number <= 4:
            time.sleep(0.05)  # time for the committer to look
            raise UnansweredError("lost")

    alive = Alive(monkeypatch)
    bench = Bench(DataStore(answer))
    bench.close_batch(queues(1))
    with without_collector(), bench.committing():
        bench.build_until(lambda: bench.commits)
    assert alive.at_encoding == [0] * 5


def test_memory_of_puts_that_s3_does_not_answer_is_free_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The SDK's exceptions hold frames that hold bodies, in circles: an outage may last, the collector looks seldom."""
    alive = Alive(monkeypatch)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = ObjectStoreSettings(endpoint_url=url, region="us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        data = S3Store("bucket", StoreOptions(settings=settings))
        bench = Bench(MemoryStore("memory://catalog"), data)
        bench.close_batch(queues(1))
        with without_collector(), bench.committing():
            bench.build_until(lambda: len(alive.at_encoding) == 4)
        data.close()
    assert alive.at_encoding == [0] * 4


def test_a_gap_after_damage_is_called_damaged_before_the_damage_is_committed() -> None:
    """Cycle two is planned while the first, which skipped part of the log, is still on its way."""
    hold = threading.Event()
    bench = Bench(DataStore(lambda _key, number: hold.wait(TIMEOUT_S) if number == 1 else None))
    bench.close_batch(queues(1), is_damaged=True)
    bench.close_batch(queues(1, offset=5))
    with bench.committing():
        bench.uploader.builder.build_next(1)
        bench.uploader.builder.build_next(1)
        hold.set()
        bench.build_until(lambda: bench.commits == 2)
    assert bench.writer.state.gaps["reason"].tolist() == [GapReason.DAMAGED]


def test_what_cannot_be_retried_ends_a_later_cycle_only_after_the_older_is_committed() -> None:
    hold = threading.Event()

    def answer(_key: str, number: int) -> None:
        if number == 1:
            hold.wait(TIMEOUT_S)
        if number == 2:
            raise AccessDeniedError("no")

    bench = Bench(DataStore(answer))
    bench.close_batch(queues(1))
    bench.close_batch(queues(1, offset=1))
    with bench.committing():
        for _ in range(5):
            bench.uploader.builder.build_next(0.05)
        assert bench.commits == 0
        hold.set()
        with pytest.raises(AccessDeniedError):
            bench.build_until(lambda: False)
    assert bench.commits == 1

"""Writes the outputs of a round of compaction in a process of its own, with the lowest priority.

In the process that uploads and serves clients, compaction would hold the interpreter's lock for up to 0.4 s at a time.
The child reads the sources and writes the outputs; planning and commits stay where the catalog writer is. The child
ends when the parent does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rocketmq_tiered.maintenance.throttle import YieldingStore
from rocketmq_tiered.process.allocator import TABLE_BYTES_MIN, return_freed_memory, trim
from rocketmq_tiered.process.logs import log_service
from tiered.archive.rewrite.outputs import rewrite
from tiered.archive.rewrite.plan import Candidates, RewritePlan
from tiered.archive.rewrite.result import OutputIdentity, RewriteOptions, RewriteResult
from tiered.archive.task import StoppedError
from tiered.errors import TieredError, UnavailableError, UnreadableError
from tiered.formats.page_decoder import decode_column_page
from tiered.formats.segment import BlockCodec
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import CompactionSettings

POLL_S = 0.25
STOP_S = 5.0
"""Time for the child to remove its files."""
NICE = 19


@dataclass(frozen=True)
class ChildStore:
    """The archive at ``url``, and how fast it is used."""

    url: str
    options: StoreOptions
    settings: CompactionSettings
    log_level: str


@dataclass(frozen=True)
class _Work:
    """What the child does."""

    store: ChildStore
    candidates: Candidates
    plan: RewritePlan
    identity: OutputIdentity
    spool_directory: Path
    spool_bytes_max: int
    codec: BlockCodec
    in_flight_bytes: int


class ChildRewrite:
    """Writes the outputs of a round of compaction as ``rewrite`` does, but in a child process."""

    def __init__(self, place: ChildStore, metrics: StoreMetrics, share: Callable[[], float]) -> None:
        """``share`` gives the child's share of bandwidth and requests and is called several times a second; it raises
        StoppedError to end the child. ``metrics`` get the child's requests at its end."""
        self._place, self._metrics, self._share = place, metrics, share

    def __call__(
        self,
        _store: ObjectStore,
        candidates: Candidates,
        plan: RewritePlan,
        identity: OutputIdentity,
        options: RewriteOptions,
    ) -> RewriteResult:
        """Start a child process, which opens the archive itself, have it write one round and return what it wrote.
        Raises its error, and UnavailableError if it ends without a result."""
        work = _Work(
            self._place,
            candidates,
            plan,
            identity,
            options.spool_directory,
            options.spool_bytes_max,
            options.codec,
            options.in_flight_bytes,
        )
        context = multiprocessing.get_context("spawn")
        connection, other = context.Pipe()
        child = context.Process(target=_child, args=(other, work), name="compaction", daemon=True)
        child.start()
        other.close()
        try:
            return self._outcome(connection, options)
        except (EOFError, OSError):  # the connection has ended
            child.join(STOP_S)
            if child.exitcode is None:
                raise
            raise UnavailableError(
                f"the child process that writes compacted objects has ended with exit code {child.exitcode}",
                hint="it is started again at the next pass; -9 often means that memory ran out: lower "
                "compaction.memory_bytes or allow more memory",
            ) from None
        finally:
            connection.close()
            child.join(STOP_S)
            if child.is_alive():
                child.kill()
                child.join()
            child.close()

    def _outcome(self, connection: Connection, options: RewriteOptions) -> RewriteResult:
        """The parent's side of one round: send the child each new share, announce each object that it is about to
        write, and return its result. Raises the child's error, and EOFError or OSError if it ends without a result."""
        sent_share: float | None = None
        while True:
            now = self._share()
            if now != sent_share:
                connection.send(now)
                sent_share = now
            if not connection.poll(POLL_S):
                continue
            message = connection.recv()
            if isinstance(message, str):  # a key, which the child uses after the receipt
                options.announce(message)
                connection.send(None)
            elif isinstance(message, Exception):
                raise message
            else:
                result, requests = message  # the last message
                self._metrics.add(requests)
                assert isinstance(result, RewriteResult)
                return result


# -- the child ------------------------------------------------------------------------------------------------


def _child(connection: Connection, work: _Work) -> None:
    """What the child process does: write one round of compaction, and send the result or the error to the parent;
    nothing if the parent stops it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends it
    _take_idle_time_only()
    return_freed_memory(TABLE_BYTES_MIN)
    decode_column_page.may_load = False  # numba would take 107 MiB
    log_service(work.store.log_level)
    parent = _Parent(connection)
    metrics = StoreMetrics()
    try:
        message: object = (_write(work, parent, metrics), metrics.snapshot())
    except StoppedError:
        return
    except TieredError as error:
        # An UnreadableError cannot be pickled: its constructor takes more than the message.
        message = UnavailableError(str(error)) if isinstance(error, UnreadableError) else error
    except Exception:  # the parent reports it
        message = RuntimeError(traceback.format_exc())
    with suppress(OSError):
        parent.send(message)


def _take_idle_time_only() -> None:
    """Let this process run only while no other wants the processor. With the lowest priority alone, another process
    that wakes up would wait for the end of this one's time slice, up to 3 ms."""
    with suppress(OSError):  # a sandbox may refuse it
        os.nice(NICE)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _write(work: _Work, parent: _Parent, metrics: StoreMetrics) -> RewriteResult:
    """Open the archive and write the round of ``work``, at the share of bandwidth and requests that the parent process
    sends from time to time. ``metrics`` count the requests. Raises StoppedError when the parent stops it."""
    place = work.store
    with closing(open_store(place.url, place.options, metrics=metrics)) as archive:
        store = YieldingStore(
            archive,
            bytes_per_s=place.settings.bytes_per_s,
            requests_per_s=place.settings.requests_per_s,
            share=lambda: parent.share,
            stopping=parent.stopped,
        )
        options = RewriteOptions(
            work.spool_directory,
            work.spool_bytes_max,
            work.codec,
            work.in_flight_bytes,
            release=trim,
            wait=parent.stopped.wait,
            announce=parent.announce,
            is_secret=place.options.settings.encrypts,
        )
        return rewrite(store, work.candidates, work.plan, work.identity, options)


class _Parent:
    """The other end: its messages are received in a thread. ``stopped``: it has ended."""

    def __init__(self, connection: Connection) -> None:
        self.share = 0.0
        self.stopped = threading.Event()
        self._announced = threading.Semaphore(0)
        self._connection, self._lock = connection, threading.Lock()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        """Receive messages of the parent process in a thread, until it closes the connection or dies. A number is this
        process's new share of bandwidth; None says that the key sent last is committed."""
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv()
                if message is None:
                    self._announced.release()
                else:
                    self.share = message
        self.stopped.set()
        self._announced.release()

    def send(self, message: object) -> None:
        """Sends a message to the parent process, from any thread."""
        with self._lock:
            self._connection.send(message)

    def announce(self, key: str) -> None:
        """Have the parent process commit that an object with this ``key`` will be written, and return once it has, so
        that the object is known even if this process dies. Raises StoppedError if the parent has ended."""
        self.send(key)
        self._announced.acquire()
        if self.stopped.is_set():
            raise StoppedError

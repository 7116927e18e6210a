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
from tiered.archive.rewrite.outputs import Rewrite, rewrite
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
"""For the child to remove its files."""
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


def writing_in_child(place: ChildStore, share: Callable[[], float], metrics: StoreMetrics) -> Rewrite:
    """A function as rewrite. ``share`` of the budget is called several times a second; it raises StoppedError
    to end the child. ``metrics`` get the child's requests at its end."""

    def write(
        _store: ObjectStore,
        candidates: Candidates,
        plan: RewritePlan,
        identity: OutputIdentity,
        options: RewriteOptions,
    ) -> RewriteResult:
        """Have the child write one round, with the signature of ``rewrite``; the child opens the store itself."""
        work = _Work(
            place,
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
            return _outcome(connection, share, options.announce, metrics)
        except (EOFError, OSError):
            child.join(STOP_S)
            if child.exitcode is None:
                raise
            raise UnavailableError(
                f"the process that joins objects has ended with exit code {child.exitcode}",
                hint="the next pass tries again; with -9, lower compaction.memory_bytes or allow more memory",
            ) from None
        finally:
            connection.close()
            child.join(STOP_S)
            if child.is_alive():
                child.kill()
                child.join()
            child.close()

    return write


def _outcome(
    connection: Connection,
    share: Callable[[], float],
    announce: Callable[[str], object],
    metrics: StoreMetrics,
) -> RewriteResult:
    """Serve the child until it has ended. Raises EOFError or OSError if it ends without a result."""
    sent: float | None = None
    while True:
        now = share()
        if now != sent:
            connection.send(now)
            sent = now
        if not connection.poll(POLL_S):
            continue
        message = connection.recv()
        if isinstance(message, str):
            announce(message)
            connection.send(None)
        elif isinstance(message, Exception):
            raise message
        else:
            result, requests = message
            metrics.add(requests)
            assert isinstance(result, RewriteResult)
            return result


# -- the child ------------------------------------------------------------------------------------------------


def _child(connection: Connection, work: _Work) -> None:
    """Write one round and send the result, or the error, to the parent; send nothing when the parent stops it."""
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
        message = UnavailableError(str(error)) if isinstance(error, UnreadableError) else error
    except Exception:  # the parent reports it
        message = RuntimeError(traceback.format_exc())
    with suppress(OSError):
        parent.send(message)


def _take_idle_time_only() -> None:
    """A thread of another process that wakes up replaces one of this process at once. With the lowest priority alone
    it waits for the end of a time slice, up to 3 ms."""
    with suppress(OSError):  # a sandbox may refuse it
        os.nice(NICE)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _write(work: _Work, parent: _Parent, metrics: StoreMetrics) -> RewriteResult:
    """Write the round at the share of bandwidth that the parent sends from time to time."""
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
        """Receive until the parent closes or dies: shares of bandwidth, and None as the receipt of an announcement."""
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
        """Returns when the parent has committed it."""
        self.send(key)
        self._announced.acquire()
        if self.stopped.is_set():
            raise StoppedError

"""The tasks of `tiered run` on the archive that it owns: expiry, garbage collection, compaction, scrub. One loop and
one throttle for all; a thread for each, so that a long step of one holds up no other.

With gc.every_ms 0 another process collects; messages expire here all the same.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fetcher.rows.message import Message
from rocketmq_tiered.maintenance.compaction_job import rewrite_options
from rocketmq_tiered.maintenance.compaction_task import CompactionTask
from rocketmq_tiered.maintenance.expire import ExpiryTask
from rocketmq_tiered.maintenance.gc import Deletions, GcTask
from rocketmq_tiered.maintenance.key_job import KeyCompaction, is_mostly_new
from rocketmq_tiered.maintenance.scrub import ScrubTask
from rocketmq_tiered.maintenance.throttle import SHARES, Load, Stopping, Throttle, YieldingStore
from rocketmq_tiered.process.allocator import trim
from rocketmq_tiered.process.loaded_archive import keyed_topics, rules_in
from rocketmq_tiered.sending.timer_broker import RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import Place, TimerDelivery
from rocketmq_tiered.sending.timer_send import everyone
from rocketmq_tiered.server.security.authorizer import sender_rights
from tiered.archive.rewrite.outputs import Rewrite
from tiered.archive.task import StateOf, StoppedError, Task, TaskLoop, TaskStatus
from tiered.archive.unreadable import UnreadableRange
from tiered.archive.verify_progress import VerifyProgress
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK
from tiered.errors import UsageError
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import Settings
from tiered.whole_file import writer_of

REFRESH_S = 60.0
JOIN_S = 10.0
"""Longest wait for a request in progress at a stop: what is uncommitted is garbage."""


class ArchiveTasks:
    """Runs them between ``start`` and ``stop``. ``store`` is the archive's, ``writer`` its owner in this process."""

    def __init__(
        self, store: ObjectStore, writer: CatalogWriter, settings: Settings, load: Callable[[], Load]
    ) -> None:
        """Expiry, and garbage collection unless gc.every_ms is 0; other tasks are added by methods. ``load`` returns
        how busy uploader and clients are: tasks get less bandwidth then."""
        self._settings, self._writer = settings, writer
        self._stopping = Stopping()
        self._throttle = Throttle(load)
        throttled = self._throttled(store, self._share, self._stopping.stopped)
        expiry = ExpiryTask(throttled, settings, lambda state: rules_in(throttled, state, settings))
        self.loops: dict[str, TaskLoop[Any]] = {}
        """The loops that run the tasks, by the tasks' names."""
        self._figures: dict[str, Callable[[], object]] = {}
        """Names of members of a status report, and what returns them."""
        self._unreadable: list[Callable[[], Iterable[UnreadableRange]]] = []
        """What each task could not read."""
        self._add(expiry)
        if settings.gc.every_ms:
            deletions = Deletions(
                settings.gc.deletes_per_s,
                is_stopped=self._stopping.stopped.is_set,
                sleep=self._stopping.wait,
            )
            self._add(GcTask(throttled, settings.gc, deletions=deletions))
        self._refreshed_s = 0.0
        self._threads: list[threading.Thread] = []

    def _add(self, task: Task[Any], state_of: StateOf | None = None) -> TaskLoop[Any]:
        """Add the loop that runs ``task``, on the archive's newest state or on what ``state_of`` returns."""
        loop = self.loops[task.name] = TaskLoop(task, state_of or self._owned_state)
        return loop

    def add_compaction(
        self, store: ObjectStore, spool: Path, writing: Callable[[Callable[[], float]], Rewrite]
    ) -> None:
        """Add the task that joins small objects. ``store``: the archive over connections of its own, so that large
        requests delay no upload; ``spool``: a directory for temporary files, which only this task uses; ``writing``
        takes a function that gives the present share of bandwidth, and returns the function that writes objects."""
        task = CompactionTask(
            store,
            self._writer,
            self._settings,
            spool,
            self._throttle,
            self._stopping,
            release=trim,
            writing=writing,
        )
        loop = TaskLoop(task, self._owned_state, level=lambda: task.level.value)
        self.loops[task.name] = loop
        self._figures["compaction"] = lambda: task.status(loop.status)
        self._unreadable.append(lambda: task.damaged.ranges)

    def add_key_compaction(
        self, store: ObjectStore, spool: Path, writing: Callable[[Callable[[], float]], Rewrite]
    ) -> None:
        """Add the task of key compaction, which keeps the latest message of each key. ``store``, ``spool`` and
        ``writing`` as for ``add_compaction``."""
        shutil.rmtree(spool, ignore_errors=True)  # what a killed process left
        settings, throttled = self._settings, self._throttled(store, self._keys_share, self._stopping)
        options = replace(rewrite_options(settings, spool), release=trim, wait=self._stopping.wait)
        task = KeyCompaction(
            self._commits(throttled),
            settings,
            options,
            lambda state: keyed_topics(rules_in(throttled, state, settings), settings),
            is_due=is_mostly_new,
            write=writing(self._keys_share_or_stop),
        )
        loop = self._add(task)
        self._figures["key_compaction"] = lambda: task.status(loop.status)

    def add_timers(
        self,
        store: ObjectStore,
        make_broker: Callable[[Callable[[], bool]], RemoteTimerBroker],
        read: Callable[[Sequence[Place]], Mapping[Place, Message]],
    ) -> None:
        """Add the task that delivers due timers. ``store``: the archive; ``make_broker`` connects to the broker and
        gets a function that says whether to stop; ``read`` reads the messages of timers by topic, queue and offset."""
        broker = make_broker(self._stopping.stopped.is_set)
        acl_file = self._settings.serve.acl_file
        judge = sender_rights(Path(acl_file), store) if acl_file else everyone
        task = TimerDelivery(self._commits(store), self._settings.timers, broker, read, judge)
        loop = self._add(task, self._timers_state)
        self._figures["timers"] = lambda: task.status(loop.status.problem)

    def add_scrub(self, store: ObjectStore, state_dir: Path, log: CommitLog) -> None:
        """Add the task that reads back what is stored in ``store``, the archive, and replaces damaged objects by the
        messages in ``log``, the broker's. Its progress is kept in ``state_dir``, over restarts."""
        scrub, path = self._settings.scrub, state_dir / "scrub.json"
        throttled = self._throttled(store, self._keys_share, self._stopping, scrub.bytes_per_s)
        progress = _progress(path, store.url, 2 * scrub.cycle_ms)
        task = ScrubTask(self._commits(throttled), scrub, progress, log)
        self._add(task)
        self._figures["scrub"] = lambda: task.status
        self._unreadable.append(lambda: task.unreadable)

    def _throttled(
        self,
        store: ObjectStore,
        share: Callable[[], float],
        stopping: Stopping | threading.Event,
        bytes_per_s: int = 0,
    ) -> YieldingStore:
        """The archive of ``store`` for a task, which gets ``share`` of the bandwidth and requests that the settings of
        compaction allow, or of ``bytes_per_s``. Once ``stopping`` is set, requests raise."""
        limits = self._settings.compaction
        return YieldingStore(
            store,
            bytes_per_s=bytes_per_s or limits.bytes_per_s,
            requests_per_s=limits.requests_per_s,
            share=share,
            stopping=stopping,
        )

    def _commits(self, store: ObjectStore) -> MaintenanceCommit:
        return MaintenanceCommit(store, self._writer, MACHINE_CLOCK)

    def start(self, drain: threading.Event) -> None:
        """Start a thread for each task. Call once. ``drain`` is set when the process is about to end: compaction begins
        no request from then on."""
        self._stopping.drain = drain
        for loop in self.loops.values():
            thread = threading.Thread(target=loop.run, name=loop.task.name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End all tasks; waits for up to ten seconds for each one's request in progress."""
        self._stopping.stopped.set()
        for loop in self.loops.values():
            loop.stop()
        for thread in self._threads:
            thread.join(JOIN_S)

    @property
    def statuses(self) -> tuple[TaskStatus, ...]:
        """What became of each task."""
        return tuple(loop.status for loop in self.loops.values())

    @property
    def figures(self) -> dict[str, Any]:
        """Members of a status report, by name: the figures of each task that has some, and the messages that compaction
        or scrub could not read."""
        found: dict[str, Any] = {name: figures() for name, figures in self._figures.items()}
        unreadable = {one for ranges in self._unreadable for one in ranges()}
        return found | {"unreadable": tuple(sorted(unreadable))}

    def _share(self) -> float:
        """Share of the budget for what has to be done each day, whether uploads are behind or not."""
        return SHARES[self._throttle.level(is_overdue=True)]

    def _keys_share(self) -> float:
        return SHARES[self._throttle.level(is_overdue=False)]

    def _keys_share_or_stop(self) -> float:
        if self._stopping.is_set():
            raise StoppedError
        return self._keys_share()

    def _timers_state(self) -> CatalogState | None:
        """The catalog state in which due timers are looked for; None while this process is not the archive's writer. It
        may be a minute old: a timer that a command has moved since then fails to be taken for delivery, and is looked
        for again."""
        state = self._writer.state_or_none if self._writer.is_claimed else None
        if state is None or not state.timers or time.monotonic() - self._refreshed_s < REFRESH_S:
            return state
        self._refreshed_s = time.monotonic()
        return self._owned_state()

    def _owned_state(self) -> CatalogState | None:
        state = self._writer.refresh()
        return state if self._writer.is_claimed else None


def _progress(path: Path, url: str, age_ms_max: int) -> VerifyProgress:
    try:
        return VerifyProgress(url, path.read_bytes(), writer_of(path), age_ms_max=age_ms_max)
    except (OSError, UsageError):  # none yet, or of another archive
        return VerifyProgress(url, None, writer_of(path), age_ms_max=age_ms_max)

"""The dispatch loop beside a running broker: reads the tail of the log, and requests the bound. Pins: offload.py.

Owns the pace and order of one round, and the checks that restart following. Never waits for the object store.

The broker writes by mmap, so inotify never fires: the tail is polled every 1 to 100 ms, faster while it grows, and
twice a second beside a stopped broker. The broker is queried only when new bytes are there, at most every
``ASK_EVERY_MS``: an idle broker costs neither requests nor a visible share of a core.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from tiered.broker_store.liveness import LivenessReport
from tiered.broker_store.pins import PinKeeper, PinStatus
from tiered.broker_store.store import BrokerStore
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.state import NO_CHECK
from tiered.clock import Clock
from tiered.errors import UnavailableError, UnreadableError
from tiered.settings.sections import OffloadSettings
from uploader.bound_source import BoundSource
from uploader.dispatcher import StepResult, TieredDispatcher
from uploader.log_divergence import CheckResult, compare_log

ASK_EVERY_MS = 100
REFRESH_FILES_EVERY_MS = 1_000
DEAD_POLL_MS = 500
"""Longest wait beside a stopped broker: its log grows only once it runs again, which takes seconds."""


class Every:
    """Tells when something is due that is done at most once in a period: at the first call, once the period has passed,
    and after the clock was set back."""

    def __init__(self, period_ms: int) -> None:
        self._period_ms = period_ms
        self._due_ms: int | None = None

    def is_due(self, now_ms: int) -> bool:
        """Whether it is due at ``now_ms``; then a new period begins."""
        if self._due_ms is not None and self._due_ms - self._period_ms <= now_ms < self._due_ms:
            return False
        self._due_ms = now_ms + self._period_ms
        return True


PIN_EVERY_MS = 5_000
ASK_END_EVERY_MS = 5_000
"""A broker that becomes a slave cuts its log without a restart; only a request shows it."""


class BrokerRestartedError(UnavailableError):
    """The broker stopped, started or cut its log: start again; nothing is lost."""


class FollowLoop:
    """Follows one broker. ``pin_status`` may be read from any thread."""

    def __init__(
        self,
        store: BrokerStore,
        settings: OffloadSettings,
        bound_source: BoundSource,
        dispatcher: TieredDispatcher,
        writer: CatalogWriter,
        pins: PinKeeper | None,
        *,
        behind: threading.Event,
        clock: Clock,
        check_failure: Callable[[], None],
    ) -> None:
        """``pins`` keeps commitlog files by hard links until they are archived; None: it is off. ``behind`` is set
        while more waits to be read than this loop reads, which wakes the thread that reads in large steps (compensate).
        ``check_failure`` raises the failure of another part."""
        self._store = store
        self._log = store.commit_log
        self._settings = settings
        self._bound_source = bound_source
        self._dispatcher = dispatcher
        self._writer = writer
        self._pins = pins
        self._behind = behind
        self._clock = clock
        self._check_failure = check_failure
        self.pin_status: PinStatus | None = None

    def run(self, stop: threading.Event) -> None:
        """Read the log of a broker as it grows, until ``stop``: poll the tail, request the broker's offsets, which
        bound what may be read, when new bytes are there, and add what lies below the bound to the open batch. Raises
        BrokerRestartedError, and what ``check_failure`` raises."""
        dispatcher, source = self._dispatcher, self._bound_source
        broker = self._store.liveness()
        wait_ms = self._settings.poll_min_ms
        longest_ms = DEAD_POLL_MS if broker.is_dead else self._settings.poll_max_ms
        ask_offsets, refresh_files = Every(ASK_EVERY_MS), Every(REFRESH_FILES_EVERY_MS)
        check_broker, check_log_end = Every(ASK_EVERY_MS), Every(ASK_END_EVERY_MS)
        result = StepResult.CAUGHT_UP
        while not stop.is_set():
            self._check_failure()
            now_ms = self._clock.wall_ms()
            if check_broker.is_due(now_ms):
                self._refuse_restarted_broker(broker)
            if refresh_files.is_due(now_ms):
                self._log.refresh()
            if check_log_end.is_due(now_ms):
                self._refuse_cut_log()
            # A step reads whole records, so if the bound is inside a record, the cursor stays below the bound.
            has_read_all = dispatcher.cursor >= source.feed.limit_phys or result is StepResult.CAUGHT_UP
            has_new = has_read_all and self._has_new_bytes()
            # Offsets are requested once even if nothing is new: without a bound the lag is unknown.
            if (has_new or source.last is None) and ask_offsets.is_due(now_ms):
                source.ask(dispatcher.cursor)
                self._refuse_overwritten_log()
            has_more = self._has_more(has_new=has_new if has_read_all else None)
            result = dispatcher.dispatch_step(source.feed) if has_more else StepResult.CAUGHT_UP
            # Beside a stopped broker the bound is the end of its last file; zeros up to there do not wait to be read.
            if result == StepResult.BUSY or (has_more and self._is_behind()):
                self._behind.set()
            dispatcher.close_if_due()
            has_progressed = result == StepResult.HANDED_OVER
            wait_ms = self._settings.poll_min_ms if has_progressed else min(longest_ms, 2 * wait_ms)
            stop.wait(wait_ms / 1000)
        self._behind.clear()

    def _refuse_restarted_broker(self, before: LivenessReport) -> None:
        """Raise BrokerRestartedError if the broker has started or stopped since ``before``, or its log has become
        shorter: it may have cut or replaced its log, so following starts again, by comparing the log with the
        archive."""
        now = self._store.liveness()
        if (now.liveness, now.pid) != (before.liveness, before.pid):
            raise BrokerRestartedError(
                f"the broker of {self._store.path} is {now.liveness.value} (was {before.liveness.value}): its log is "
                "compared with the archive again"
            )
        last = self._bound_source.last
        if last is not None and last.has_retreated:
            raise BrokerRestartedError(
                f"the log of the broker of {self._store.path} now ends at commitlog offset {last.phys}, lower than "
                "before: it is compared with the archive again"
            )

    def _refuse_cut_log(self) -> None:
        """Raise BrokerRestartedError if the broker reports an end of its log below what was read of it. Checked even if
        nothing new is at the read position: records after a cut are written below it."""
        end_phys = self._bound_source.reported_end_phys()
        if end_phys is not None and end_phys < self._dispatcher.cursor:
            raise BrokerRestartedError(
                f"the log of the broker of {self._store.path} ends at commitlog offset {end_phys}, but was read up to "
                f"{self._dispatcher.cursor}: it is compared with the archive again"
            )

    def _refuse_overwritten_log(self) -> None:
        """Raise BrokerRestartedError if the bytes below the read position are no longer those that were read: the log
        was cut, and has grown beyond that position since. Checked after the broker's offsets were read, so that no
        offset of another log is used."""
        state = self._writer.state_or_none
        check = self._dispatcher.log_check() or (state.cursor.check if state is not None else NO_CHECK)
        to_phys = self._dispatcher.cursor
        if compare_log(self._log, check, to_phys=to_phys) is not CheckResult.DIFFERENT:
            return
        self._log.refresh()  # the broker may have deleted the file
        if compare_log(self._log, check, to_phys=to_phys) is CheckResult.DIFFERENT:
            raise BrokerRestartedError(
                f"the commitlog of {self._store.path} below offset {check.end_phys} has other bytes than were read of "
                "it: it is compared with the archive again"
            )

    def _has_more(self, *, has_new: bool | None) -> bool:
        """Whether a step of reading may progress. ``has_new``: whether there are new bytes at the read position; None:
        that was not looked at yet."""
        cursor, feed = self._dispatcher.cursor, self._bound_source.feed
        # Below what a live broker reports as written, zeros and missing files are passed too.
        if cursor < feed.proven_phys or cursor >= feed.limit_phys:
            return cursor < feed.proven_phys
        # The bound of a dead broker is the end of its last file, which may not be written up to there.
        return self._has_new_bytes() if has_new is None else has_new

    def _has_new_bytes(self) -> bool:
        """Whether the log continues at the read position: its next bytes are not zeros, or files are missing there and
        later ones exist. Takes one small read, of a page that the broker has just written."""
        cursor = self._dispatcher.cursor
        try:
            head = self._log.read(cursor, 8)
        except UnreadableError:
            return True  # the dispatch step gets the same error and handles it
        return any(head) or (self._log.file_at(cursor) is None and self._log.max_file_end > cursor)

    def step_pins(self) -> None:
        """Pin commitlog files that are not archived yet (keep them by hard links), within the disk limits, and release
        archived ones. A failure of the pin directory becomes a part of ``pin_status``, and archiving continues."""
        if self._pins is None:
            return
        state = self._writer.state_or_none
        archived_phys = state.cursor.phys if state is not None else self._log.min_phys
        files_of_broker = [file for file in self._log.files if not file.is_pinned]
        try:
            self.pin_status = self._pins.step(files_of_broker, archived_phys)
        except OSError as error:
            place = f" {error.filename}" if error.filename else ""
            problem = f"pins not updated: {error.strerror or error}{place}"
            self.pin_status = replace(self.pin_status or PinStatus(), problem=problem)

    def _is_behind(self) -> bool:
        unread = self._bound_source.feed.limit_phys - self._dispatcher.cursor
        return unread > self._settings.batch_bytes // 4

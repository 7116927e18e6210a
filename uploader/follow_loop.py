"""The dispatch loop beside a running broker: looks at the log's tail, asks for the bound, keeps the pins.

Owns pace and order of one round, and what makes following start again. Never waits for the object store. Does not own
reading (dispatcher.py) nor the bound's decision (bound_source.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from tiered.broker_store.liveness import LivenessReport
from tiered.broker_store.pins import PinKeeper, PinStatus
from tiered.broker_store.store import BrokerStore
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.state import NO_CHECK
from tiered.errors import UnavailableError, UnreadableError
from tiered.settings.sections import OffloadSettings
from uploader.bound_source import BoundSource
from uploader.dispatcher import StepResult, TieredDispatcher
from uploader.follow import ASK_EVERY_MS, REFRESH_FILES_EVERY_MS, AdaptivePoll, Every
from uploader.log_divergence import CheckResult, compare

PIN_EVERY_MS = 5_000
ASK_END_EVERY_MS = 5_000
"""A broker that becomes a slave cuts its log without being started again, and says so only when it is asked."""


class BrokerRestartedError(UnavailableError):
    """The broker went away, came back or cut its log: start again; nothing is lost."""


@dataclass(frozen=True)
class FollowContext:
    """What the loop works on. ``behind`` wakes the compensate thread; ``check_failure`` raises what a part did."""

    store: BrokerStore
    settings: OffloadSettings
    bound_source: BoundSource
    dispatcher: TieredDispatcher
    writer: CatalogWriter
    pins: PinKeeper | None
    behind: threading.Event
    clock_ms: Callable[[], int]
    check_failure: Callable[[], None]


class FollowLoop:
    """One broker followed. ``pin_status`` from any thread."""

    def __init__(self, context: FollowContext) -> None:
        self._context = context
        self._log = context.store.commit_log
        self.pin_status: PinStatus | None = None

    def run(self, stop: threading.Event) -> None:
        """Follow until ``stop``. Raises BrokerRestartedError, and what ``check_failure`` raises."""
        context = self._context
        dispatcher, source = context.dispatcher, context.bound_source
        poll = AdaptivePoll(min_ms=context.settings.poll_min_ms, max_ms=context.settings.poll_max_ms)
        ask, refresh = Every(ASK_EVERY_MS), Every(REFRESH_FILES_EVERY_MS)
        alive, pin = Every(ASK_EVERY_MS), Every(PIN_EVERY_MS)
        ask_end = Every(ASK_END_EVERY_MS)
        broker = context.store.liveness()
        while not stop.is_set():
            context.check_failure()
            now_ms = context.clock_ms()
            if alive.is_due(now_ms):
                self._refuse_restarted_broker(broker)
            if refresh.is_due(now_ms):
                self._log.refresh()
            if ask_end.is_due(now_ms):
                self._refuse_cut_log()
            wants_more = dispatcher.cursor >= source.feed.limit_phys and self._has_new_bytes()
            # Once in any case: without it nobody could say that nothing is behind.
            if (wants_more or source.last is None) and ask.is_due(now_ms):
                source.ask(dispatcher.cursor)
                self._refuse_overwritten_log()
            result = dispatcher.dispatch_step(source.feed) if self._has_more() else StepResult.CAUGHT_UP
            if result == StepResult.BUSY or self._is_behind():
                context.behind.set()
            dispatcher.close_if_due()
            if pin.is_due(now_ms):
                self.step_pins()
            stop.wait(poll.next_wait_ms(progressed=result == StepResult.HANDED_OVER) / 1000)
        context.behind.clear()

    def _refuse_restarted_broker(self, before: LivenessReport) -> None:
        """A broker that started or ended since may have cut or replaced its log: begin again from the archive's end,
        with the log-line check, rather than trust what was read before."""
        now = self._context.store.liveness()
        if (now.liveness, now.pid) != (before.liveness, before.pid):
            raise BrokerRestartedError(
                f"the broker is {now.liveness.value} now (was {before.liveness.value}): the log is checked again"
            )
        last = self._context.bound_source.last
        if last is not None and last.has_retreated:
            raise BrokerRestartedError(f"the broker's log ends at {last.phys} now, lower than before")

    def _refuse_cut_log(self) -> None:
        """Also where nothing new stands at the cursor: what comes after a cut comes below it."""
        end_phys = self._context.bound_source.reported_end_phys()
        if end_phys is not None and end_phys < self._context.dispatcher.cursor:
            raise BrokerRestartedError(
                f"the broker's log ends at {end_phys} now, lower than what was read of it"
            )

    def _refuse_overwritten_log(self) -> None:
        """The last bytes read, written over: a log that was cut, and has grown beyond what was read of it. After the
        broker's word, that no such word is believed."""
        state = self._context.writer.state_or_none
        check = self._context.dispatcher.log_check() or (
            state.cursor.check if state is not None else NO_CHECK
        )
        if compare(self._log, check) is not CheckResult.DIFFERENT:
            return
        self._log.refresh()  # the broker may have deleted them between two looks
        if compare(self._log, check) is CheckResult.DIFFERENT:
            raise BrokerRestartedError(f"the broker's log is another one below {check.end_phys} now")

    def _has_more(self) -> bool:
        """Below the broker's word also zeros, or no file at all, are something to get past. A dead broker says
        nothing: its bound is the end of the last file, written or not."""
        cursor, feed = self._context.dispatcher.cursor, self._context.bound_source.feed
        return cursor < feed.proven_phys or (cursor < feed.limit_phys and self._has_new_bytes())

    def _has_new_bytes(self) -> bool:
        """Whether anything but zeros stands at the cursor, or the log goes on behind files that are gone; costs one
        small read of a hot page."""
        cursor = self._context.dispatcher.cursor
        try:
            head = self._log.read(cursor, 8)
        except UnreadableError:
            return True  # no zeros, as far as anybody can tell: dispatching meets the same, and judges it
        return any(head) or (self._log.file_at(cursor) is None and self._log.max_file_end > cursor)

    def step_pins(self) -> None:
        """Keep files that are not archived yet, within the disk rules; let go of those that are. A directory of pins
        that fails (a disk that became read-only) is said, and archiving goes on."""
        if self._context.pins is None:
            return
        state = self._context.writer.state_or_none
        archived = state.cursor.phys if state is not None else self._log.min_phys
        own = [file for file in self._log.files if not file.is_pinned]
        try:
            self.pin_status = self._context.pins.step(own, archived)
        except OSError as error:
            place = f" {error.filename}" if error.filename else ""
            problem = f"pins cannot be kept up: {error.strerror or error}{place}"
            self.pin_status = replace(self.pin_status or PinStatus(), problem=problem)

    def _is_behind(self) -> bool:
        return (
            self._context.bound_source.feed.limit_phys - self._context.dispatcher.cursor
            > self._context.settings.batch_bytes // 4
        )

"""Admits reads to the byte budget: which wait for memory, and for how long."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from fetcher.blocks.budget import Admission, ByteBudget
from fetcher.io.request_scheduler import Priority
from fetcher.io.timer import Timer
from fetcher.io.waiting import Wait
from tiered.errors import ThrottledError, UnavailableError


class MemoryShortError(ThrottledError):
    """Readers hold too much memory for this read; a smaller one may fit."""


class MemoryAdmission:
    """Charges ``budget``. ``wait_ms``: how long a user waits, where there is a ``timer``."""

    def __init__(
        self, budget: ByteBudget, wait_ms: int, *, clock_s: Callable[[], float], timer: Timer | None
    ) -> None:
        self._budget = budget
        self._clock_s = clock_s
        self._timer = timer
        self._wait_ms = wait_ms
        self.waits = 0
        """User reads that waited."""
        self.refused = 0
        """Reads that got none."""
        self._is_closed = False

    async def charge(self, cost_bytes: int, priority: Priority, key: str) -> None:
        """Charge the budget. User reads wait for memory for a limited time; prefetch does not wait."""
        if priority is Priority.PREFETCH:
            if not self._budget.try_charge(cost_bytes, priority):
                raise self._no_memory(cost_bytes, key)
            return
        admission = self._budget.charge(cost_bytes, priority)
        if admission.future.done() and admission.future.exception() is None:
            return
        self.waits += priority is Priority.USER
        if self._is_closed:
            self._budget.withdraw(admission, _closed())
        elif self._timer is not None:
            # Weak: until then the timer would keep the admission's callbacks, and what they lead to, in memory.
            refuse = partial(self._on_timeout, weakref.ref(admission), key)
            self._timer.call_at(self._clock_s() + self._wait_ms / 1000, refuse)
        try:
            await Wait(admission.future)
        except BaseException:
            if not self._budget.withdraw(admission) and admission.future.exception() is None:
                self._budget.release(cost_bytes)  # charged just before the reader was closed
            del admission
            raise

    def close(self) -> None:
        """Refuse waiting reads, before the timer that limits them is closed. Idempotent."""
        self._is_closed = True
        self._budget.refuse_waiting(_closed)

    def _on_timeout(self, waiting: weakref.ref[Admission], key: str) -> None:
        admission = waiting()
        if admission is not None and not admission.future.done():
            self._budget.withdraw(admission, self._no_memory(admission.byte_count, key))

    def _no_memory(self, cost_bytes: int, key: str) -> MemoryShortError:
        self.refused += 1
        return MemoryShortError(
            f"{key}: no memory for {cost_bytes} bytes, {self._budget.charged_bytes} of "
            f"{self._budget.total_bytes} are held",
            hint="retry later; raise fetch.memory_bytes if this happens often; "
            "keep copies of messages, bytes(message.data), rather than the messages",
        )


def _closed() -> UnavailableError:
    return UnavailableError("cannot read: the archive is closed")

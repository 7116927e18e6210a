"""One byte budget for the whole read path: caches, requests in flight, decoded blocks, blocks in use.

Bytes are charged before memory is allocated. A decoded block stays charged while it is referenced: its charge is tied
to the array and released when the array dies. So the sum never exceeds the total, and caches, consumers and requests
need no accounts of their own.

A single charge above the total is admitted alone. Waiting charges are served by priority, then in order, even if a
later one would fit: nothing starves. Does not own what is evicted to make room (reclaimers) nor time limits.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import Timer, Wait, new_future
from tiered.clock import Clock
from tiered.errors import ThrottledError, TieredError, UnavailableError

Reclaimer = Callable[[int, int], None]
"""``reclaim(needed_bytes, priority)``: drop references until so many bytes are released, or as many as allowed for that
priority. It is not called again before more is charged or released."""


@dataclass(eq=False)
class Admission:
    """A requested charge. ``future`` is done once the bytes are charged, or refused."""

    byte_count: int
    priority: int
    future: Future[None] = field(default_factory=new_future)


class _Tie(weakref.ref[Any]):
    """A weak reference with the charge of its object."""

    __slots__ = ("byte_count",)
    byte_count: int


class ByteBudget:
    """At most ``total_bytes`` charged at once. Thread-safe; never blocks."""

    def __init__(self, total_bytes: int) -> None:
        """``total_bytes``: how much memory reading this archive may hold: blocks, tails of objects, buffers."""
        self._lock = threading.Lock()
        self._total_bytes = total_bytes
        self._charged_bytes = 0
        self._reserved_bytes = 0
        self._peak_bytes = 0
        self._waiting: list[Admission] = []
        self._reclaimers: list[Reclaimer] = []
        self._ties: dict[int, _Tie] = {}
        # Python frees an object wherever its last reference goes away, which may be inside this class's lock. So freed
        # objects are only noted here, without the lock, and settled later.
        self._dead: deque[int] = deque()
        self.waits = 0

    @property
    def total_bytes(self) -> int:
        """The bound."""
        return self._total_bytes

    @property
    def charged_bytes(self) -> int:
        """Charged now."""
        self._settle()
        return self._charged_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever charged and set aside."""
        return self._peak_bytes

    def add_reclaimer(self, reclaimer: Reclaimer) -> None:
        """Ask ``reclaimer`` for room when a charge does not fit. Called without a lock held, from any thread."""
        self._reclaimers.append(reclaimer)

    # -- charging ---------------------------------------------------------------------------------------------

    def try_charge(self, byte_count: int, priority: int) -> bool:
        """Charge now, reclaiming if necessary, or not at all. Never overtakes a waiting charge."""
        if self._charge_now(byte_count):
            return True
        self._reclaim(byte_count, priority)
        return self._charge_now(byte_count)

    def _charge_now(self, byte_count: int) -> bool:
        """Charge ``byte_count`` if that much is free and no other charge waits; return whether it was charged. No cache
        has to free memory for it."""
        self._settle()
        with self._lock:
            fits = not self._waiting and self._fits(byte_count)
            if fits:
                self._charge(byte_count)
        self._settle()
        return fits

    def charge(self, byte_count: int, priority: int) -> Admission:
        """Charge ``byte_count`` as soon as that much is free; the future of the result is done then. Of several waiting
        charges the one with the lowest ``priority`` number comes first."""
        admission = Admission(byte_count, priority)
        if self.try_charge(byte_count, priority):
            admission.future.set_result(None)
            return admission
        with self._lock:
            self.waits += 1
            at = sum(1 for other in self._waiting if other.priority <= priority)
            self._waiting.insert(at, admission)
        self.revise()
        return admission

    def withdraw(self, admission: Admission, error: TieredError | None = None) -> bool:
        """Cancel a charge that still waits; its future fails with ``error``, if given. Returns False if it had been
        charged already."""
        with self._lock:
            if admission not in self._waiting:
                return False
            self._waiting.remove(admission)
        if error is not None:
            admission.future.set_exception(error)
        self.revise()
        return True

    def refuse_waiting(self, error: Callable[[], TieredError]) -> None:
        """All that waits now fails, each with an ``error`` of its own."""
        with self._lock:
            refused, self._waiting = self._waiting, []
        for admission in refused:
            admission.future.set_exception(error())

    def release(self, byte_count: int) -> None:
        """Give back bytes that were charged."""
        with self._lock:
            self._uncharge(byte_count)
        self.revise()

    def tie(self, byte_count: int, owner: Any) -> None:
        """Give ``byte_count``, charged before, back when ``owner`` dies (views of an array keep it alive)."""
        tie = _Tie(owner, self._on_death)
        tie.byte_count = byte_count
        with self._lock:
            self._ties[id(tie)] = tie
        self._settle()

    def reserve(self, byte_count: int, priority: int) -> bool:
        """Reserve ``byte_count`` of the total, reclaiming if necessary. Never overtakes a waiting charge."""
        if self._reserve_now(byte_count):
            return True
        self._reclaim(byte_count, priority)
        return self._reserve_now(byte_count)

    def _reserve_now(self, byte_count: int) -> bool:
        """Reserve ``byte_count`` if that much is free and no charge waits; return whether it was reserved. No cache has
        to free memory for it."""
        self._settle()
        with self._lock:
            fits = not self._waiting and self._free_bytes >= byte_count
            if fits:
                self._reserved_bytes += byte_count
                self._peak_bytes = max(self._peak_bytes, self._charged_bytes + self._reserved_bytes)
        self._settle()
        return fits

    def unreserve(self, byte_count: int) -> None:
        """Bytes that were set aside are free again."""
        with self._lock:
            self._reserved_bytes -= byte_count
        self.revise()

    def revise(self) -> None:
        """Charge what waits and fits now, and let caches free memory for the first charge that does not. Called when
        caches may have memory to free."""
        self._settle(force=True)
        with self._lock:
            first = self._waiting[0] if self._waiting else None
        if first is not None:
            self._reclaim(first.byte_count, first.priority)
            self._settle(force=True)

    # -- inside -----------------------------------------------------------------------------------------------

    @property
    def _free_bytes(self) -> int:
        return self._total_bytes - self._reserved_bytes - self._charged_bytes

    def _fits(self, byte_count: int) -> bool:
        return self._charged_bytes == 0 or byte_count <= self._free_bytes

    def _charge(self, byte_count: int) -> None:
        self._charged_bytes += byte_count
        self._peak_bytes = max(self._peak_bytes, self._charged_bytes + self._reserved_bytes)

    def _uncharge(self, byte_count: int) -> None:
        if byte_count > self._charged_bytes:
            raise ValueError(f"{byte_count} bytes released, only {self._charged_bytes} are charged")
        self._charged_bytes -= byte_count

    def _on_death(self, tie: weakref.ref[Any]) -> None:
        self._dead.append(id(tie))
        self._settle()

    def _settle(self, *, force: bool = False) -> None:
        """Release the charges of objects that Python has freed, and charge what waits and fits now. Without ``force``
        this does not wait for the lock: the thread that holds it does the same when it is done."""
        while self._dead or force:
            if not self._lock.acquire(blocking=force):
                return
            force = False
            admitted: list[Admission] = []
            try:
                while self._dead:
                    self._uncharge(self._ties.pop(self._dead.popleft()).byte_count)
                while self._waiting and self._fits(self._waiting[0].byte_count):
                    admitted.append(self._waiting.pop(0))
                    self._charge(admitted[-1].byte_count)
            finally:
                self._lock.release()
            for admission in admitted:
                admission.future.set_result(None)

    def _reclaim(self, byte_count: int, priority: int) -> None:
        for reclaimer in self._reclaimers:
            needed = self.charged_bytes + self._reserved_bytes + byte_count - self._total_bytes
            if needed > 0:
                reclaimer(needed, priority)


class MemoryShortError(ThrottledError):
    """Readers hold too much memory for this read; a smaller one may fit."""


class MemoryAdmission:
    """Charges ``budget``. ``wait_ms``: how long a user waits, where there is a ``timer``."""

    def __init__(self, budget: ByteBudget, wait_ms: int, *, clock: Clock, timer: Timer | None) -> None:
        """``wait_ms``: how long a user's read waits for memory before it fails. Without a ``timer`` it waits without a
        limit, as in a simulation."""
        self._budget = budget
        self._clock = clock
        self._timer = timer
        self._wait_ms = wait_ms
        self.waits = 0
        """User reads that waited."""
        self.refused = 0
        """Reads that failed because no memory became free in time."""
        self._is_closed = False

    async def charge(self, cost_bytes: int, priority: Priority, key: str) -> None:
        """Charge the memory that a read of the object ``key`` needs. A user's read waits for memory for a limited time,
        a prefetch does not wait. Raises MemoryShortError if there is none."""
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
            # A weak reference: otherwise the timer would keep the read in memory until the time has passed.
            refuse = partial(self._on_timeout, weakref.ref(admission), key)
            self._timer.call_at(self._clock.monotonic_s() + self._wait_ms / 1000, refuse)
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
        """Count a read that got no memory, and return its error."""
        self.refused += 1
        return MemoryShortError(
            f"{key} cannot be read: there is no memory for {cost_bytes} bytes, as "
            f"{self._budget.charged_bytes} of {self._budget.total_bytes} are in use",
            hint="retry later; raise fetch.memory_bytes if this happens often; "
            "keep copies of messages, bytes(message.data), rather than the messages",
        )


def _closed() -> UnavailableError:
    return UnavailableError("the read waited for memory when the archive was closed")

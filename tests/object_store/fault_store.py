"""Injects faults: loses, stalls, delays and refuses requests, and logs each.

Seeded and free of clocks: a simulation passes its own ``wait``.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from tiered.errors import AlreadyExistsError, StoreFullError, ThrottledError, TieredError, UnansweredError
from tiered.object_store.interface import Body, ObjectInfo, ObjectStore, Piece
from tiered.object_store.wrapper import StoreWrapper

T = TypeVar("T")


class Fault(Enum):
    """Fault of a request."""

    LOST_BEFORE = "lost before effect"
    LOST_AFTER = "lost after effect"
    STALLED = "stalled until its time-out; the effect may land later (land_stalled)"
    THROTTLED = "refused: 503"
    CONFLICT = "refused: 409, repeat the same bytes"
    FULL = "refused: no space"


@dataclass(frozen=True)
class FaultRule:
    """``fault`` hits requests of ``operations`` whose key matches the shell pattern ``keys``.

    The first ``skip`` matches pass, then at most ``times`` are hit (None: all), each with ``probability``.
    """

    fault: Fault
    operations: frozenset[str] = frozenset({"put"})
    keys: str = "*"
    probability: float = 1.0
    times: int | None = None
    skip: int = 0


class Request(NamedTuple):
    """One entry of the request log. ``outcome`` is "ok", a Fault's name, or an error's class name."""

    operation: str
    key: str
    outcome: str


OPERATIONS = frozenset({"put", "compose", "get", "get_range", "list", "delete", "clock"})


@dataclass
class _Armed:
    rule: FaultRule
    seen: int = 0
    hits: int = 0


class FaultStore(StoreWrapper):
    """``store`` with faults. ``requests`` is the log, in order of completion.

    ``wait(seconds)`` passes the time of a stall: ``timeout_s`` of the call, or ``stall_s`` without one.
    """

    def __init__(
        self,
        store: ObjectStore,
        rules: Sequence[FaultRule] = (),
        *,
        seed: int = 0,
        stall_s: float = 30.0,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(store)
        self._random = random.Random(seed)
        self._stall_s = stall_s
        self._wait = wait
        self._lock = threading.Lock()
        self._armed = [_Armed(rule) for rule in rules]
        self._stalled: list[tuple[str, list[Piece]]] = []
        self.requests: list[Request] = []

    def __repr__(self) -> str:
        return f"FaultStore({self._store!r}, rules={len(self._armed)}, requests={len(self.requests)})"

    # -- control -----------------------------------------

    def add(self, rule: FaultRule) -> None:
        """Add a rule; the first that matches and fires wins."""
        with self._lock:
            self._armed.append(_Armed(rule))

    def clear(self) -> None:
        """Remove all rules. The log and the stalled effects stay."""
        with self._lock:
            self._armed.clear()

    def hits(self) -> dict[FaultRule, int]:
        """Number of hits of each rule."""
        with self._lock:
            return {armed.rule: armed.hits for armed in self._armed}

    def land_stalled(self) -> list[str]:
        """Apply stalled PUTs, as when a network recovers. Returns the keys created."""
        with self._lock:
            stalled, self._stalled = self._stalled, []
        landed = []
        for key, body in stalled:
            try:
                self._store.compose_if_absent(key, body)
            except AlreadyExistsError:
                continue
            landed.append(key)
        return landed

    # -- the store -----------------------------------------

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """See ObjectStore."""
        fault = self._draw("put", key)
        if fault is Fault.STALLED:
            with self._lock:
                self._stalled.append((key, [bytes(piece) for piece in body]))
        self._refuse("put", key, fault, timeout_s)
        self._record("put", key, fault, lambda: self._store.put_if_absent(key, body, timeout_s=timeout_s))

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """See ObjectStore."""
        fault = self._draw("compose", key)
        if fault is Fault.STALLED:
            held = [piece if isinstance(piece, tuple) else bytes(piece) for piece in pieces]
            with self._lock:
                self._stalled.append((key, held))
        self._refuse("compose", key, fault, timeout_s)
        self._record(
            "compose",
            key,
            fault,
            lambda: self._store.compose_if_absent(key, pieces, timeout_s=timeout_s, spool=spool),
        )

    def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
        """See ObjectStore."""
        return self._call("get", key, lambda: self._store.get(key, max_bytes))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See ObjectStore."""
        return self._call("get_range", key, lambda: self._store.get_range(key, offset, length))

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """See ObjectStore. A fault hits the call, not the iteration."""
        return self._call(
            "list", prefix, lambda: self._store.list(prefix, start_after=start_after, limit=limit)
        )

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore. Logged for each key; the first key decides the fault."""
        fault = self._draw("delete", keys[0]) if keys else None
        self._refuse("delete", keys[0] if keys else "", fault, None)
        for key in keys[1:]:
            self._log("delete", key, "ok")
        self._record("delete", keys[0] if keys else "", fault, lambda: self._store.delete(keys))

    def clock_ms(self, prefix: str = "") -> int:
        """See ObjectStore."""
        return self._call("clock", "", lambda: self._store.clock_ms(prefix))

    # -- faults -----------------------------------------

    def _call(self, operation: str, key: str, act: Callable[[], T]) -> T:
        fault = self._draw(operation, key)
        self._refuse(operation, key, fault, None)
        return self._record(operation, key, fault, act)

    def _draw(self, operation: str, key: str) -> Fault | None:
        with self._lock:
            for armed in self._armed:
                rule = armed.rule
                if operation not in rule.operations or not fnmatchcase(key, rule.keys):
                    continue
                armed.seen += 1
                exhausted = rule.times is not None and armed.hits >= rule.times
                if armed.seen <= rule.skip or exhausted or self._random.random() >= rule.probability:
                    continue
                armed.hits += 1
                return rule.fault
        return None

    def _refuse(self, operation: str, key: str, fault: Fault | None, timeout_s: float | None) -> None:
        """Raise for faults that precede the effect."""
        if fault is None or fault is Fault.LOST_AFTER:
            return
        if fault is Fault.STALLED:
            self._wait(self._stall_s if timeout_s is None else timeout_s)
        self._log(operation, key, fault.name)
        raise _ERRORS[fault](f"{self.url}: {operation} {key}: {fault.value} (injected)")

    def _record(self, operation: str, key: str, fault: Fault | None, act: Callable[[], T]) -> T:
        try:
            answer = act()
        except TieredError as error:
            self._log(operation, key, type(error).__name__)
            raise
        if fault is Fault.LOST_AFTER:
            self._log(operation, key, fault.name)
            raise UnansweredError(f"{self.url}: {operation} {key}: {fault.value} (injected)")
        self._log(operation, key, "ok")
        return answer

    def _log(self, operation: str, key: str, outcome: str) -> None:
        with self._lock:
            self.requests.append(Request(operation, key, outcome))


_ERRORS: dict[Fault, type[TieredError]] = {
    Fault.LOST_BEFORE: UnansweredError,
    Fault.STALLED: UnansweredError,
    Fault.THROTTLED: ThrottledError,
    Fault.CONFLICT: ThrottledError,
    Fault.FULL: StoreFullError,
}

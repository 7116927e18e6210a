"""Kills a process at a chosen moment of a request, as the proxy between it and the object store sees it.

Owns the moments and the proof that the kill hit one. Does not own the process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from tests.servers.proxy import FaultProxy, ProxiedRequest, Stage
from tests.soak.request_log import archive_key, is_commit_put, is_data_put

MOMENTS = ("scan", "data PUT", "between PUT and commit", "commit sent", "reply lost")
_BY_STAGE: dict[str, tuple[Callable[[ProxiedRequest], bool], tuple[Stage, ...]]] = {
    "data PUT": (is_data_put, (Stage.ARRIVED, Stage.RECEIVED)),
    "between PUT and commit": (is_data_put, (Stage.ANSWERED,)),
    "commit sent": (is_commit_put, (Stage.ARRIVED, Stage.RECEIVED)),
    "reply lost": (is_commit_put, (Stage.TAKEN,)),
}
SCAN_AFTER_S = 0.2
POLL_S = 0.01


@dataclass
class Kill:
    """One kill: what stood in the request log at that instant."""

    moment: str
    begin: int
    """Requests in the log when the process was started."""
    end: int
    """Requests in the log when it was killed."""
    key: str = ""
    stage: str = ""


@dataclass
class Killer:
    """Kills ``pid`` once, at ``moment`` of a cycle of messages (never while the epoch is being claimed).

    ``variant`` picks among the stages of a moment. ``cycles``: cycles of messages that pass unharmed before.
    """

    proxy: FaultProxy
    pid: int
    moment: str
    variant: int
    cycles: int
    killed: Kill | None = None
    _begin: int = 0
    _committed: int = 0
    _has_data: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: threading.Event = field(default_factory=threading.Event)
    _calm: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._begin = len(self.proxy.requests)

    def on_stage(self, request: ProxiedRequest) -> None:
        """For FaultProxy.on_stage."""
        with self._lock:
            if self.killed is not None:
                return
            self._has_data = self._has_data or is_data_put(request)
            due = self._has_data and self._committed >= self.cycles
            if due and self.moment in _BY_STAGE:
                applies, stages = _BY_STAGE[self.moment]
                if applies(request) and request.stage is stages[self.variant % len(stages)]:
                    self._kill(archive_key(request), request.stage.name)
                    return
            if self._has_data and is_commit_put(request) and request.stage is Stage.ANSWERED:
                self._committed += 1
                self._calm.set()

    def strike(self, timeout_s: float) -> Kill:
        """Wait for the moment; what was hit. AssertionError when it does not come in time."""
        deadline_s = time.monotonic() + timeout_s
        while not self._done.wait(POLL_S):
            assert time.monotonic() < deadline_s, f"{self.moment} did not come in {timeout_s} s"
            if self.moment == "scan" and self._calm.is_set() and self._committed > self.cycles:
                time.sleep(SCAN_AFTER_S)
                with self._lock:
                    if self.killed is None and all(one.ended_s for one in list(self.proxy.requests)):
                        self._kill("", "")
        assert self.killed is not None
        return self.killed

    def _kill(self, key: str, stage: str) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.killed = Kill(self.moment, self._begin, len(self.proxy.requests), key, stage)
        self._done.set()


def is_proven(kill: Kill, requests: list[ProxiedRequest]) -> bool:
    """Whether the request log says that the kill hit its moment.

    ``requests``: the log up to where the killed process was surely gone. Scan and between: no request came after the
    kill was decided. Otherwise the struck request was made once, and the kill came before the proxy answered it (later
    bytes in the dead process's socket were not read); a lost reply was the store's yes.
    """
    if kill.moment in ("scan", "between PUT and commit"):
        return not requests[kill.end :]
    struck = [one for one in requests[kill.begin :] if one.method == "PUT" and archive_key(one) == kill.key]
    was_taken = kill.moment != "reply lost" or struck[-1].status == HTTPStatus.OK
    return len(struck) == 1 and kill.stage != Stage.ANSWERED.name and was_taken

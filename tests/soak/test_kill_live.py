"""kill -9 of `tiered run` while a broker takes 20,000 messages a second, at five kinds of moment, again and again.

The process is the real one; a proxy between it and MinIO says when, and its log is the proof.

Kills a process at a chosen moment of a request, as the proxy between it and the object store sees it.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.servers.proxy import FaultProxy, ProxiedRequest, Stage
from tests.servers.running_store import RunningStore
from tests.soak.request_log import archive_key, is_commit_put, is_data_put
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS = knob("KILL_TIMES", 10)
RATE = knob("KILL_PER_SECOND", 20_000)
TRIES_MAX = 3
HEADROOM = 1.05
"""The producer aims a little higher than what must be reached."""
LOAD = Load(1 << 40, body_bytes=256, threads=4, per_second=int(RATE * HEADROOM), batch=32)
SETTINGS = {"TIERED_OFFLOAD__BATCH_AGE_MS": 500}


def kill_at(moment: str, sidecar: Sidecar, proxy: FaultProxy, generator: random.Random) -> bool:
    """Start, kill, and judge by the log whether the moment was hit."""
    sidecar.start()
    killer = Killer(proxy, sidecar.pid, moment, variant=generator.randrange(2), cycles=generator.randrange(3))
    proxy.on_stage = killer.on_stage
    kill = killer.strike(60)
    assert sidecar.process is not None
    sidecar.process.wait()
    time.sleep(0.05)
    return is_proven(kill, list(proxy.requests))


def test_killed_at_every_moment_while_messages_pour_in(tmp_path: Path, minio_url: RunningStore) -> None:
    generator = random.Random(9)
    tried: Counter[str] = Counter()
    hit: Counter[str] = Counter()
    with FaultProxy(minio_url.endpoint) as proxy:
        scene = Scene(settings=SETTINGS, endpoint=proxy.endpoint)
        with beside_broker(scene, tmp_path, minio_url) as sidecar:
            with Producer(sidecar.broker, scene, LOAD, tmp_path / "producer.out") as producer:
                for moment in MOMENTS * (KILLS * TRIES_MAX):
                    if hit[moment] < KILLS:
                        tried[moment] += 1
                        hit[moment] += kill_at(moment, sidecar, proxy, generator)
                proxy.on_stage = lambda _request: None
                sidecar.start()
                sent = producer.finish(30, now=True)
            sidecar.wait_until_archived(300)
            compared = finish(sidecar)
    publish(
        "kill -9 live",
        missed=limits(
            every_moment_was_hit=all(hit[moment] >= KILLS for moment in MOMENTS),
            nothing_is_missing=compared.shown >= sent.acked,
            nothing_is_there_twice=compared.shown <= sent.acked + sent.failed,
            rate=sent.acked / sent.seconds >= RATE,
        ),
        kills={moment: f"{hit[moment]} of {tried[moment]}" for moment in MOMENTS},
        messages=compared.shown,
        acked=sent.acked,
        failed=sent.failed,
        messages_per_s=round(sent.acked / sent.seconds),
        seconds=round(sent.seconds),
        send_p99_ms=round(sent.p99_us / 1000, 1),
    )


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

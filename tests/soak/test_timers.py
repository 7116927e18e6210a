"""100,000 timers over 400 virtual days, and 2,000 over minutes beside real brokers while the sidecar is killed 50
times: each once by key, none early."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from benchmarks.timer_store import write_store
from tests.end_to_end.offloading import backfill
from tests.integration.live_scene import Scene as Live
from tests.integration.live_scene import beside_broker
from tests.integration.timer_live import OwnTimers, Wave, delivered, late_ms, quantiles, sent_timers, started
from tests.sending.timer_scene import HOUR, NOW, Scene
from tests.servers.running_store import RunningStore
from tests.soak.results import knob, limits, publish
from tiered.archive.verify import verify_archive
from tiered.errors import UnansweredError
from tiered.object_store.interface import Body, ObjectStore
from tiered.object_store.wrapper import StoreWrapper

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
DAY = 24 * HOUR
AHEAD = 6 * HOUR
"""timers.ahead_ms: a virtual day is a few passes."""
STEP = AHEAD - 5 * 60_000
"""What nothing delays is handed over in time."""


class Mortal(StoreWrapper):
    """A process's store: it dies at its PUT number ``dies_at``, before or after the effect, and stays dead. Replies to
    a share of its PUTs are lost. ``where``: names the PUT; ``seen`` counts."""

    def __init__(
        self, store: ObjectStore, rng: Random, mean_puts: int, where: Callable[[], str], seen: Counter[str]
    ) -> None:
        super().__init__(store)
        self._rng, self._left, self._where = rng, 1 + int(rng.expovariate(1 / mean_puts)), where
        self._seen, self.died = seen, ""

    def _living(self) -> None:
        if self.died:
            raise KeyboardInterrupt

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._living()
        self._left -= 1
        if self._left <= 0:
            self.died = self._where()
            if self._rng.random() < 0.5:
                super().put_if_absent(key, body)
            raise KeyboardInterrupt
        super().put_if_absent(key, body)
        if self._rng.random() < 0.003:
            self._seen["replies lost"] += 1
            raise UnansweredError("reply lost")

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._living()
        return super().get_range(key, offset, length)


def test_400_days(tmp_path: Path) -> None:
    """The broker takes no timers for the first 100 days, as 4.9, and is updated then."""
    begun_s, count, days = time.process_time(), knob("TIMERS", 100_000), knob("TIMER_DAYS", 400)
    logging.getLogger("rocketmq_tiered.sending").setLevel(logging.CRITICAL)
    rng, scene = Random(1), Scene(tmp_path, max_delay_ms=0, ahead_ms=AHEAD, url="memory://timers")
    times = _times(rng, count, days)
    write_store(tmp_path / "timers", count, times.__getitem__)
    seen = Counter[str]()
    while not _is_archived(scene, tmp_path / "timers", rng, seen):
        pass
    scene.target.fault = lambda _number: rng.choice(["before", "after", "crash"]) * (rng.random() < 0.001)
    end_ms, back_ms = NOW + (days + 1) * DAY, 0
    process = _process(scene, rng, seen)
    while scene.now_ms < end_ms:
        has_timers = scene.now_ms >= NOW + days * DAY // 4
        scene.target.max_delay_ms = 72 * HOUR * has_timers
        if scene.now_ms >= back_ms:
            scene.target.is_away = rng.random() < 0.02
            back_ms = scene.now_ms + scene.target.is_away * rng.randrange(1, 4) * STEP
            seen["absences"] += scene.target.is_away
        if rng.random() < 0.05:  # a clock ahead sends early, so it goes ahead only where the broker waits
            scene.skew_ms = rng.randrange(-2 * HOUR, 2 * HOUR * has_timers + 1) * (not scene.skew_ms)
            seen["jumps of the clock"] += 1
        try:
            scene.now_ms += STEP
            scene.one_pass()
        except KeyboardInterrupt:
            seen[f"killed: {process.died or 'send'}"] += 1
            process = _process(scene, rng, seen)
    scene.target.is_away, scene.skew_ms, scene.target.fault = False, 0, lambda _number: ""
    scene.start()
    scene.run(scene.now_ms + DAY, HOUR)
    early, late_ms = 0, []
    for _, key, sent_ms, deliver_ms in scene.target.stored:
        assert deliver_ms == times[int(key[1:])]
        early += sent_ms < deliver_ms and "TIMER_DELIVER_MS" not in scene.target.properties[key]
        late_ms.append(max(0, sent_ms - deliver_ms))
    late_ms.sort()
    counts, kills = scene.target.counts, sum(seen[name] for name in seen if name.startswith("killed"))
    missed = limits(
        each_once=len(counts) == count and set(counts.values()) == {1},
        none_early=not early,
        nothing_left=scene.state.timers == (),
        kills=kills >= knob("TIMER_KILLS", 50),
    )
    scene.check()
    scene.close()
    publish(
        "timers over virtual days",
        missed=missed,
        timers=count,
        days=days,
        kills=kills,
        seen=dict(seen),
        handed_over_late=sum(ms > 0 for ms in late_ms),
        late_max_hours=round(late_ms[-1] / HOUR, 1),
        cpu_seconds=round(time.process_time() - begun_s),
    )


def _times(rng: Random, count: int, days: int) -> list[int]:
    """Most are sent in the order of delivery, but for a day; the last tenth in any."""
    ordered = count * 9 // 10
    found = [NOW + 2 * HOUR + number * days * DAY // ordered for number in range(ordered)]
    found = [min(ms + rng.randrange(DAY), NOW + days * DAY) for ms in found]
    return found + [NOW + 2 * HOUR + rng.randrange(days * DAY) for _ in range(count - ordered)]


def _is_archived(scene: Scene, store: Path, rng: Random, seen: Counter[str]) -> bool:
    """Archive, and die on the way."""
    process = Mortal(scene.root, rng, 12, lambda: "enqueue", seen)
    try:
        backfill(store, process)
    except KeyboardInterrupt:
        seen["killed: enqueue"] += 1
        return False
    return True


def _process(scene: Scene, rng: Random, seen: Counter[str]) -> Mortal:
    """A new process that delivers."""

    def where() -> str:
        return "progress" if scene.task._over else "claim"

    process = Mortal(scene.store, rng, 60, where, seen)
    scene.start(process)
    return process


LONGEST_S = 20
"""timerMaxDelaySec: nearly all timers are beyond."""
LIVE = {
    "5.3.3": {"timerWheelEnable": "true", "timerMaxDelaySec": LONGEST_S},
    "4.9.7": {},
}


@pytest.mark.parametrize("version", LIVE)
def test_live(version: str, tmp_path: Path, minio_url: RunningStore) -> None:
    """After the kills, more timers without any, to see how late they are beside the broker's own."""
    count, spread_s, kills = (
        knob("LIVE_TIMERS", 2000),
        knob("LIVE_TIMERS_S", 600),
        knob("LIVE_TIMER_KILLS", 50),
    )
    settings = {"TIERED_TIMERS__AHEAD_MS": 8_000, "TIERED_OFFLOAD__BATCH_AGE_MS": 500}
    rng = Random(2)
    with beside_broker(
        Live(version, config=LIVE[version], settings=settings), tmp_path, minio_url
    ) as sidecar:
        broker = sidecar.broker
        sent = started(sidecar, tmp_path, Wave(count, 40_000, spread_s * 1000))
        own = [OwnTimers(broker, sent)] if LIVE[version] else []
        begun_s = time.monotonic()
        for _ in range(kills):
            sidecar.wait_until_following(120)
            time.sleep(rng.uniform(0, 2 * max(0, spread_s - (time.monotonic() - begun_s)) / kills))
            sidecar.kill()
            sidecar.start()
        killed_s = time.monotonic() - begun_s
        sidecar.wait_until_following(120)
        time.sleep(15)  # what a killed process had claimed
        calm = sent_timers(broker, tmp_path / "calm", Wave(count // 4, 40_000, 60_000))
        own += [OwnTimers(broker, calm)] if LIVE[version] else []
        time.sleep(max(0, max(map(int, {**sent, **calm}.values())) / 1000 - time.time()))
        rows = delivered(broker, tmp_path / "consumed", count + len(calm))
        found = Counter(row[4] for row in rows)
        late = late_ms([row for row in rows if row[4] in sent], sent)
        calm_late = late_ms([row for row in rows if row[4] in calm], calm)
        own_late = [timers.late_ms(tmp_path / f"own-{number}") for number, timers in enumerate(own)]
        missed = limits(
            each_once=set(found) == {*sent, *calm} and set(found.values()) == {1},
            none_early=min(late + calm_late) >= 0,
        )
        sidecar.wait_until_archived(120)
        assert sidecar.stop() == 0
        report = verify_archive(sidecar.open_archive(), depth="full")
        assert not report.anomalies and not report.counts.get("timers")
    publish(
        f"timers beside {version}",
        missed=missed,
        timers=count,
        kills=kills,
        kills_s=round(killed_s),
        late_ms=quantiles(late),
        late_ms_without_kills=quantiles(calm_late),
        late_ms_of_the_broker_s_own=[quantiles(one) for one in own_late],
        load=os.getloadavg(),
    )

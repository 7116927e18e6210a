"""100,000 timers over 400 virtual days: each once by key, in its hour, whatever fails."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.timer_store import write_store
from tests.sending.timer_scene import HOUR, NOW, Scene

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
COUNT = 100_000
DAYS = 400


def test_400_days(tmp_path: Path) -> None:
    rng, scene = random.Random(1), Scene(tmp_path)
    times = [NOW + 2 * HOUR + rng.randrange(DAYS * 24 * HOUR) for _ in range(COUNT)]
    write_store(tmp_path / "timers", COUNT, times.__getitem__)
    scene.broker.path = tmp_path / "timers"
    scene.archive()
    scene.start()
    scene.target.fault = lambda number: {0: "before", 1: "after", 2: "crash"}.get(number % 2000, "")
    end_ms, kills, jumps = NOW + (DAYS + 1) * 24 * HOUR, 0, 0
    while scene.now_ms < end_ms:
        scene.target.is_away = rng.random() < 0.01
        if rng.random() < 0.001:
            scene.now_ms -= 10 * 60_000
            jumps += 1
        try:
            scene.run(scene.now_ms + 2 * HOUR, HOUR // 2)
        except KeyboardInterrupt:
            kills += 1
            scene.start()
    assert set(scene.target.counts.values()) == {1} and len(scene.target.counts) == COUNT
    late = sorted(sent_ms - deliver_ms for _, _, sent_ms, deliver_ms in scene.target.stored)
    assert late[0] >= -HOUR - 60_000
    print(f"{kills} kills, {jumps} jumps of the clock, last late by {late[-1]} ms")
    assert scene.state.timers == ()
    scene.check()
    scene.close()

"""Delivery of timers: when, in which order, once by key, whatever fails."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.cli import main
from rocketmq_tiered.sending.timer_change import change_timer
from rocketmq_tiered.sending.timer_plan import FAN_IN, BrokerTimers, horizon_ms, to_merge
from tests.sending.target_broker import TargetScene
from tests.sending.timer_scene import HOUR, NOW, Scene
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.timer_refs import TimerRef
from tiered.formats import timer_object
from tiered.settings.timer_section import TimerSettings


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def test_timers_are_handed_over_an_hour_ahead_in_order(scene: Scene) -> None:
    scene.broker.timer("far", NOW + 5 * HOUR, KEYS="k", TIERED_QUEUE="2")
    scene.broker.timer("near", NOW + 10_000)
    scene.broker.timer("mid", NOW + 2 * HOUR)
    scene.broker.timer("twice", NOW + 2 * HOUR)
    scene.broker.timer("twice", NOW + 2 * HOUR)
    scene.broker.timer("gone", NOW + 2 * HOUR)
    scene.broker.send_with({"TIERED_CANCEL": f"{NOW + 2 * HOUR} gone"})
    scene.broker.send_with({"UNIQ_KEY": "bad", "TIERED_TOPIC": "x", "TIERED_DELIVER_MS": "soon"})
    scene.archive()
    scene.start()
    scene.run(NOW + HOUR - 120_000, 60_000)
    assert [found[1] for found in scene.target.stored] == ["near"]
    scene.run(NOW + 5 * HOUR, 60_000)
    assert [found[1] for found in scene.target.stored] in (
        ["near", "mid", "twice", "far"],
        ["near", "twice", "mid", "far"],
    )
    for _, _, sent_ms, deliver_ms in scene.target.stored[1:]:
        assert deliver_ms - HOUR <= sent_ms <= deliver_ms - HOUR + 60_000
    counts = scene.task.counts
    assert (counts.delivered, counts.cancelled, counts.repeated, counts.refused) == (4, 1, 1, 1)
    assert "TIERED_TIMERS queue 0 offset 7" in counts.problem
    assert scene.target.bodies["far"].startswith(b"far")
    properties = dict(scene.target.properties["far"])
    assert properties.pop("TIMER_DELIVER_MS") == str(NOW + 5 * HOUR)
    assert properties == {"UNIQ_KEY": "far", "KEYS": "k"}
    assert scene.state.timers == ()
    scene.check()


def test_a_broker_without_timers_gets_each_at_its_time(scene: Scene) -> None:
    scene.target.max_delay_ms = 0
    for number in range(5):
        scene.broker.timer(f"k{number}", NOW + 7_000 * (number + 1) + 1)
    scene.archive()
    scene.start()
    scene.run(NOW + 60_000)
    assert len(scene.target.stored) == 5
    for _, key, sent_ms, deliver_ms in scene.target.stored:
        assert 0 <= sent_ms - deliver_ms < 1000
        assert "TIMER_DELIVER_MS" not in scene.target.properties[key]


@pytest.mark.parametrize("seed", range(2))
def test_each_key_once_whatever_fails(seed: int, scene: Scene) -> None:
    rng = random.Random(seed)
    scene.target.max_delay_ms = rng.choice([0, 72 * HOUR])
    wanted = set()
    for number in range(60):
        key = f"k{number}"
        scene.broker.timer(key, NOW + rng.randrange(3 * HOUR))
        wanted.add(key)
    scene.archive()
    faults = {rng.randrange(1, 60): rng.choice(["before", "after", "crash"]) for _ in range(8)}
    scene.target.fault = lambda number: faults.pop(number, "")
    scene.start()
    while scene.now_ms < NOW + 3 * HOUR + 120_000:
        scene.target.is_away = rng.random() < 0.1
        try:
            scene.run(scene.now_ms + 120_000, 30_000)
        except KeyboardInterrupt:
            scene.start()
        if rng.random() < 0.05:
            scene.start()
    scene.target.is_away = False
    scene.run(scene.now_ms + 120_000, 5_000)
    assert scene.target.counts == dict.fromkeys(wanted, 1)
    assert not faults or max(faults) > 0
    if not scene.target.max_delay_ms:
        assert all(sent_ms >= deliver_ms for _, _, sent_ms, deliver_ms in scene.target.stored)
    assert scene.state.timers == ()
    scene.check()


def test_what_the_broker_refuses_is_tried_again_on_time(scene: Scene) -> None:
    for key in ("a", "b"):
        scene.broker.timer(key, NOW + 2 * HOUR)
    scene.archive()
    scene.start()
    scene.target.refusal = lambda send: (
        "flow control" if send.key == "a" and scene.now_ms < NOW + HOUR + 60_000 else ""
    )
    scene.run(NOW + HOUR + 120_000, 20_000)
    assert scene.target.counts == {"b": 1}
    assert "waits, the broker refuses it: flow control" in scene.task.counts.problem
    scene.start()
    scene.run(NOW + 2 * HOUR, 60_000)
    assert scene.target.counts == {"a": 1, "b": 1}
    assert scene.target.stored[-1][3] == NOW + 2 * HOUR
    assert scene.state.timers == ()


@pytest.mark.parametrize("restarts", [False, True], ids=["one process", "restarted"])
def test_a_timer_that_the_broker_refused_is_cancelled_by_its_time(scene: Scene, restarts: bool) -> None:
    """The cancellation that proxy mode makes of a recall handle has the time that the producer gave."""
    for key in ("a", "b", "c"):
        scene.broker.timer(key, NOW + 2 * HOUR)
    scene.archive()
    scene.start()
    scene.target.refusal = lambda send: "flow control" if send.key in "ab" else ""
    scene.run(NOW + HOUR + 60_000, 20_000)
    assert scene.target.counts == {"c": 1} and scene.task.counts.postponed == 2
    for key in ("a", "c"):
        scene.broker.send_with({"TIERED_CANCEL": f"{NOW + 2 * HOUR} {key}"})
    scene.archive()
    if restarts:
        scene.start()
    scene.run(NOW + HOUR + 120_000, 20_000)
    scene.target.refusal = lambda _send: ""
    scene.run(NOW + 2 * HOUR, 60_000)
    assert scene.target.counts == {"b": 1, "c": 1}
    assert scene.target.stored[-1][3] == NOW + 2 * HOUR
    assert scene.task.counts.cancelled == 1 and scene.state.timers == ()
    scene.check()


def test_refused_timers_of_one_time_do_not_keep_others_waiting(scene: Scene) -> None:
    """More than a batch, all refused, with a cancellation among them."""
    scene.settings = TimerSettings(ahead_ms=HOUR, rate_per_s=1)
    for number in range(40):
        scene.broker.timer(f"k{number}", NOW + HOUR)
    scene.broker.timer("last", NOW + HOUR + 1)
    scene.archive()
    scene.start()
    scene.target.refusal = lambda send: "no topic" if send.key != "last" else ""
    scene.run(NOW + 60_000)
    assert scene.target.counts == {"last": 1} and scene.task.counts.postponed == 40
    scene.broker.send_with({"TIERED_CANCEL": f"{NOW + HOUR} k7"})
    scene.archive()
    scene.run(NOW + 120_000)
    assert scene.task.counts.postponed == 40, "they are tried again after ten minutes only"
    scene.target.refusal = lambda _send: ""
    scene.run(NOW + 13 * 60_000, 10_000)
    assert scene.target.counts == {"last": 1} | {f"k{n}": 1 for n in range(40) if n != 7}
    assert scene.state.timers == ()


def test_messages_are_read_once_for_several_claims(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_object, "PAGE_ROWS", 4)
    for number in range(40):
        scene.broker.timer(f"k{number:02d}", NOW + HOUR - 1000 * (number * 7 % 40))
    scene.archive()
    scene.settings = TimerSettings(ahead_ms=HOUR, rate_per_s=1)
    scene.start()
    reads: list[int] = []
    monkeypatch.setattr(scene.task, "_read", lambda places: reads.append(len(places)) or scene._read(places))
    version = scene.state.version
    scene.run(NOW + 60_000, 60_000)
    assert [deliver_ms for _, _, _, deliver_ms in scene.target.stored] == [
        NOW + HOUR - 1000 * seconds for seconds in range(39, -1, -1)
    ]
    assert reads == [40] and scene.state.version >= version + 9
    scene.check()


def test_objects_of_many_commits_become_one(scene: Scene) -> None:
    for number in range(FAN_IN):
        scene.broker.timer(f"k{number}", NOW + (number + 5) * HOUR)
        scene.archive()
    assert len(scene.state.timers) == FAN_IN
    scene.start()
    scene.run(NOW + 1000)
    (ref,) = scene.state.timers
    assert ref.entries == FAN_IN
    scene.run(NOW + (FAN_IN + 5) * HOUR, 5 * 60_000)
    assert scene.target.counts == {f"k{number}": 1 for number in range(FAN_IN)}
    scene.check()


def test_horizons() -> None:
    five = BrokerTimers(72 * HOUR)
    assert horizon_ms(NOW, 0, five) == NOW + 1
    assert horizon_ms(NOW, HOUR, BrokerTimers(0)) == NOW + 1
    assert NOW + HOUR - 60_000 < horizon_ms(NOW, HOUR, five) <= NOW + HOUR
    assert NOW + 6_000 < horizon_ms(NOW, HOUR, BrokerTimers(10_000)) <= NOW + 9_000


def test_merges_take_objects_of_one_size() -> None:
    refs = [TimerRef(1, number, 0, 9, 10, 0, 0, 99, 9) for number in range(FAN_IN)]
    assert to_merge(refs[1:]) == []
    assert to_merge([*refs, TimerRef(1, 99, 0, 9, 10_000, 0, 0, 99, 9)]) == refs
    assert to_merge([ref.moved(0, 1) for ref in refs]) == []
    mostly = TimerRef(1, 99, 0, 9, 10_000, 5_001, 5_001, 99, 9)
    assert to_merge([mostly]) == [mostly]


def test_timers_are_cancelled_and_moved_until_their_hand_over(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        scene.broker.timer(f"k{number}", NOW + (5 + number) * HOUR)
    scene.archive()
    scene.start()

    def tiered(*arguments: str) -> Any:
        code = main(["timers", arguments[0], scene.url, *arguments[1:], "--json"])
        out = capsys.readouterr().out
        return json.loads(out) if code == 0 else code

    hours = [{"hourMs": (NOW // HOUR + 5 + at) * HOUR, "pending": 1} for at in range(4)]
    assert tiered("stats") == {"pending": 4, "objects": 1, "hours": hours}
    assert [(row["uniqKey"], row["topic"]) for row in tiered("ls")] == [
        (f"k{at}", "orders") for at in range(4)
    ]
    assert tiered("cancel", "k1") == {"uniqKey": "k1", "wasMs": NOW + 6 * HOUR, "deliverMs": None}
    commits = MaintenanceCommit.opened(scene.store, scene.state, "timers", lambda: NOW)
    assert change_timer(commits, "k2", NOW + 7 * HOUR, at_ms=NOW + 20 * HOUR) == NOW + 7 * HOUR
    assert change_timer(commits, "k2", at_ms=NOW + 9 * HOUR) == NOW + 20 * HOUR
    assert tiered("show", "k1") == 3 and tiered("cancel", "k1") == 3
    assert [row["uniqKey"] for row in tiered("ls", "--limit", "9")] == ["k0", "k3", "k2"]
    scene.run(NOW + 7 * HOUR + 61_000, 60_000)
    assert tiered("cancel", "k3") == 3  # handed over an hour ahead
    scene.run(NOW + 21 * HOUR, 60_000)
    assert scene.target.counts == {"k0": 1, "k2": 1, "k3": 1}
    assert {found[1]: found[3] for found in scene.target.stored}["k2"] == NOW + 9 * HOUR
    assert scene.state.timers == ()
    scene.check()


def test_pending_timers_move_to_the_gateway_topic_of_another_broker(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that were delivered or cancelled do not, nor does a cancellation."""
    for number in range(6):
        scene.broker.timer(f"k{number}", NOW + (number + 1) * HOUR)
    scene.broker.send_with({"TIERED_CANCEL": f"{NOW + 5 * HOUR} k4"})
    scene.archive()
    scene.start()
    scene.run(NOW + 61 * 60_000, 60_000)
    assert scene.target.counts == {"k0": 1, "k1": 1}
    position = str(scene.path / "position")
    with TargetScene({"TIERED_TIMERS": (4, 6)}).running() as target:
        command = ["republish", scene.url, "--to", target.address, "--topics", "TIERED_TIMERS"]
        for more in (["--dry-run"], [], []):
            assert main([*command, "--position", position, *more]) == 0
    said = capsys.readouterr().out
    assert "dry run: 3 messages" in said and "3 messages sent" in said and "0 messages sent" in said
    found = [message.properties for messages in target.stored.values() for message in messages]
    assert [(one["UNIQ_KEY"], one["TIERED_TOPIC"], one["TIERED_DELIVER_MS"]) for one in found] == [
        (f"k{at}", "orders", str(NOW + (at + 1) * HOUR)) for at in (2, 3, 5)
    ]

"""Delivery of timers: when, in which order, each place once, whatever fails and however keys repeat."""

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fetcher.rows.message import Message
from rocketmq_tiered.cli import main
from rocketmq_tiered.maintenance.repair.repair import apply_repair, plan_repair
from rocketmq_tiered.sending import timer_delivery
from rocketmq_tiered.sending.timer_change import change_timers
from rocketmq_tiered.sending.timer_delivery import FAN_IN, horizon_ms, to_merge
from rocketmq_tiered.sending.timer_send import TimerSend, is_entry_of, timer_send
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.kernels.record_builder import Message as Written
from tests.kernels.record_builder import encode, properties
from tests.maintenance.damage import flip
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tests.sending.target_broker import TargetScene
from tests.sending.timer_scene import HOUR, NOW, Scene
from tiered.archive.index.key_hash import xxh64
from tiered.archive.task import run_pass
from tiered.archive.timers import TimerName, hash_of
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.timer_refs import TimerRef
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.formats import timer_object
from tiered.formats.keys import catalog_key
from tiered.formats.timer_object import ENTRY_DTYPE
from tiered.model.queue import QueueKey
from tiered.model.timer import DELIVER_MS, TOPIC, UNIQUE_KEY, TimerPlace, cancel_properties
from tiered.settings.sections import TimerSettings
from tiered.timestamps import wall_ms


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def test_timers_are_handed_over_an_hour_ahead_in_order(scene: Scene) -> None:
    scene.broker.timer("far", NOW + 5 * HOUR, KEYS="k", TIERED_QUEUE="2")
    scene.broker.timer("near", NOW + 10_000)
    scene.broker.timer("mid", NOW + 2 * HOUR)
    scene.broker.timer("gone", NOW + 2 * HOUR)
    scene.broker.send_with(cancel_properties("orders", NOW + 2 * HOUR, "gone"))
    scene.broker.send_with({"UNIQ_KEY": "bad", "TIERED_TOPIC": "x", "TIERED_DELIVER_MS": "soon"})
    scene.archive()
    scene.start()
    scene.run(NOW + HOUR - 120_000, 60_000)
    assert [found[1] for found in scene.target.stored] == ["near"]
    scene.run(NOW + 5 * HOUR, 60_000)
    assert [found[1] for found in scene.target.stored] == ["near", "mid", "far"]
    for _, _, sent_ms, deliver_ms in scene.target.stored[1:]:
        assert deliver_ms - HOUR <= sent_ms <= deliver_ms - HOUR + 60_000
    status = scene.task.status()
    assert (status.delivered, status.cancelled, status.refused, status.pending) == (3, 1, 1, 0)
    assert scene.target.sent[-1] == ("0:0", "orders", "far 0")
    properties = dict(scene.target.properties["far"])
    assert properties.pop("TIMER_DELIVER_MS") == str(NOW + 5 * HOUR)
    assert properties.pop("TIERED_PLACE").startswith("0:0:")
    assert properties == {"UNIQ_KEY": "far", "KEYS": "k"}
    assert [ref.entries - ref.done for ref in scene.state.timers] == [1], "what was refused"
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


def test_a_sender_is_judged_again_at_the_hand_over(scene: Scene) -> None:
    lost = {"lost"}
    scene.judge = lambda properties, body: "it lost PUB" if properties["UNIQ_KEY"] in lost and body else None
    for key in ("kept", "lost"):
        scene.broker.timer(key, NOW + 5 * HOUR)
    scene.archive()
    scene.start()
    scene.run(NOW + 5 * HOUR, 60_000)
    assert list(scene.target.counts) == ["kept"]
    assert scene.task.status().problem.endswith("it lost PUB")
    lost.clear()
    scene.run(NOW + 6 * HOUR, 60_000)
    assert scene.target.counts == {"kept": 1, "lost": 1}, "the right came back"


@pytest.mark.parametrize("ends", ["", "restarted", "killed with the claim of the cancellation"])
def test_a_timer_that_the_broker_refused_is_cancelled_by_its_time(
    scene: Scene, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation that proxy mode makes of a recall handle has the time that the producer gave."""
    for key in ("a", "b", "c"):
        scene.broker.timer(key, NOW + 2 * HOUR + (key == "b"))
    scene.archive()
    scene.start()
    scene.target.refusal = lambda send: "flow control" if send.key in "ab" else ""
    scene.run(NOW + HOUR + 60_000, 20_000)
    assert scene.target.counts == {"c": 1} and scene.task.status().postponed == 2
    assert scene.task.counts.problem == "TIERED_TIMERS queue 0 offset 1: flow control"
    assert not scene.task.status().overdue_seconds
    for key in ("a", "c"):
        scene.broker.send_with(cancel_properties("orders", NOW + 2 * HOUR, key))
    scene.archive()
    if ends.startswith("killed"):
        right = scene.commits.commit

        def commit(*arguments: Any) -> bool:
            assert right(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(scene.commits, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            scene.run(NOW + HOUR + 120_000, 20_000)
        scene.target.refusal = lambda _send: ""
    if ends:
        scene.start()
    scene.run(scene.now_ms + 60_000, 20_000)
    scene.target.refusal = lambda _send: ""
    scene.run(NOW + 2 * HOUR, 60_000)
    assert scene.target.counts == {"b": 1, "c": 1}
    assert scene.target.stored[-1][3] == NOW + 2 * HOUR + 1
    assert scene.task.counts.cancelled == 1 and scene.state.timers == ()
    scene.check()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_broker_is_searched_once_what_was_on_its_way_is_stored(scene: Scene, is_restarted: bool) -> None:
    """The connection ends with a message on its way, which the broker stores up to two seconds later."""
    scene.broker.timer("k", NOW + HOUR // 2)
    scene.archive()
    scene.start()
    late: list[TimerSend] = []

    def lost(send: TimerSend) -> str:
        if not late:
            late.append(send)
            raise UnavailableError("the connection ended")
        return ""

    scene.target.refusal = lost
    with pytest.raises(UnavailableError):
        run_pass(scene.task, scene.commits.refresh)
    if is_restarted:
        scene.start()
    for number in range(30):
        scene.now_ms += 500
        if number == 2:
            scene.target.send(late, lambda _send: None, 0.0)
        run_pass(scene.task, scene.commits.refresh)
    assert scene.target.counts == {"k": 1} and scene.state.timers == ()


def test_an_entry_is_of_the_message_at_its_place_however_often_it_was_moved() -> None:
    """After a log was cut, one with the same key and topic lies at a timer's place, or one of another time."""
    pairs = {UNIQUE_KEY: "K", TOPIC: "orders", DELIVER_MS: str(NOW + HOUR)}
    text = properties(*((name.encode(), value.encode()) for name, value in pairs.items()))
    data = encode(Written(b"TIERED_TIMERS", 0, 9, b"body", text, 0, NOW), 5_000)
    message = Message(QueueKey("TIERED_TIMERS", 0, 0), 9, memoryview(data), NOW)
    entry = np.zeros(1, ENTRY_DTYPE)
    entry["key_hash"], entry["physical_offset"], entry["deliver_ms"] = hash_of("K"), 5_000, NOW + HOUR
    assert is_entry_of(message, entry[0], "orders") and not is_entry_of(message, entry[0], "mails")
    entry["deliver_ms"], entry["moved_ms"], entry["changes"] = NOW + 3 * HOUR, 2 * HOUR, 1_000
    assert is_entry_of(message, entry[0], "orders"), "it was moved a thousand times"
    for name in ("physical_offset", "moved_ms"):
        entry[name] += 1
        assert not is_entry_of(message, entry[0], "orders")
        entry[name] -= 1


def test_a_timer_that_was_handed_over_before_a_repair_is_not_sent_again(scene: Scene) -> None:
    """The commits that say so are damaged."""
    for number in range(2):
        scene.broker.timer(f"k{number}", NOW + (number + 1) * HOUR)
    scene.archive()
    before = scene.state.version
    scene.start()
    scene.run(NOW + HOUR, 60_000)
    for version in range(before + 1, scene.state.version + 1):
        flip(scene.store, catalog_key(version), 60)
    apply_repair(plan_repair(scene.store, (CLUSTER, BROKER), scene.now_ms, applies=True))
    scene.start()
    scene.run(NOW + 3 * HOUR, 60_000)
    assert scene.target.counts == {"k0": 1, "k1": 1}
    scene.check()


def test_what_is_sent_names_the_message_apart_from_others_at_its_place_in_other_logs() -> None:
    """A new, empty log has the queue and physical offsets of the one before."""
    pairs = {UNIQUE_KEY: "K", TOPIC: "orders", DELIVER_MS: str(NOW + HOUR)}
    text = properties(*((name.encode(), value.encode()) for name, value in pairs.items()))
    messages = [
        Message(
            QueueKey("TIERED_TIMERS", 0, generation),
            0,
            memoryview(encode(Written(b"TIERED_TIMERS", 0, 0, b"body", text, 0, stored_ms), 0)),
            NOW,
        )
        for stored_ms, generation in ((NOW, 0), (NOW, 1), (NOW + 1, 1))
    ]
    first, archived_again, other = (timer_send(one, NOW + HOUR, has_timers=True).place for one in messages)
    assert first == archived_again and first != other


def test_a_timer_that_is_cancelled_twice_holds_no_other_timers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ended with the claim of the first cancellation; with the second one come a timer, and the
    cancellation of another that is due with it."""
    scene.broker.timer("a", NOW + HOUR)
    scene.broker.timer("c", NOW + 2 * HOUR)
    scene.broker.send_with(cancel_properties("orders", NOW + HOUR, "a"))
    scene.archive()
    scene.start()
    right = scene.commits.commit

    def commit(*arguments: Any) -> bool:
        assert right(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(scene.commits, "commit", commit)
    with pytest.raises(KeyboardInterrupt):
        scene.run(NOW + 60_000, 20_000)
    scene.broker.send_with(cancel_properties("orders", NOW + HOUR, "a"))
    scene.broker.timer("b", NOW + HOUR)
    scene.broker.send_with(cancel_properties("orders", NOW + 2 * HOUR, "c"))
    scene.archive()
    scene.start()
    scene.run(NOW + 180_000, 5_000)
    assert scene.target.counts == {"b": 1}
    scene.run(NOW + 3 * HOUR, 60_000)
    assert scene.target.counts == {"b": 1} and scene.state.timers == ()


def test_topics_with_one_hash_are_two_topics(scene: Scene) -> None:
    """Such names are found in a second."""
    topics = ["orders-A49J53m4N", "orders-BDIDKEYKL"]
    assert len({xxh64(topic.encode()) for topic in topics}) == 1
    for hours in (2, 3):
        for topic in topics:
            scene.broker.timer("k", NOW + hours * HOUR, topic)
    scene.broker.send_with(cancel_properties(topics[0], NOW + 2 * HOUR, "k"))
    scene.archive()
    scene.start()
    assert change_timers(scene.commits, TimerName(topics[1], "k")) == [NOW + 2 * HOUR, NOW + 3 * HOUR]
    scene.run(NOW + 4 * HOUR, 60_000)
    assert [(place, topic) for place, topic, _ in scene.target.sent] == [("0:2", topics[0])]
    assert scene.task.status().cancelled == 3
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
    assert scene.target.counts == {"last": 1} and scene.task.status().postponed == 40
    scene.broker.send_with(cancel_properties("orders", NOW + HOUR, "k7"))
    scene.archive()
    tried = scene.target.refusals
    scene.run(NOW + 120_000)
    assert scene.target.refusals == tried, "they are tried again after ten minutes only"
    assert scene.task.status().postponed == 39
    scene.target.refusal = lambda _send: ""
    scene.run(NOW + 13 * 60_000, 10_000)
    assert scene.target.counts == {"last": 1} | {f"k{n}": 1 for n in range(40) if n != 7}
    assert scene.state.timers == ()


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_claim_is_renewed_while_sending_takes_long(
    is_taken_over: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent after its end, and nothing more once another process owns the archive."""
    for number in range(500):
        scene.broker.timer(f"k{number}", NOW + HOUR)
    scene.archive()
    scene.start()
    right, calls = scene.target.send, list[int]()

    def send(sends: Any, sent: Any, until_s: float) -> Any:
        assert scene.now_ms / 1000 <= until_s
        calls.append(len(sends))
        scene.now_ms += 4_000
        if is_taken_over and len(calls) == 2:
            owner = {"instance": "other", "kind": "run", "wait": lambda _: None}
            clock = {"clock": Clock(wall_ms=lambda: scene.now_ms), "random": random.Random(1)}
            CatalogWriter(scene.store, cluster=CLUSTER, broker=BROKER, **owner, **clock).claim(take_over=True)
        return right(sends, sent, until_s)

    monkeypatch.setattr(scene.target, "send", send)
    scene.now_ms += 60_000
    with pytest.raises(UnavailableError) if is_taken_over else nullcontext():
        run_pass(scene.task, scene.commits.refresh)
    assert sum(calls) == len(scene.target.sent)
    assert calls == ([64, 16] if is_taken_over else [64, *[16] * 27, 4]), "as many as take a second"
    assert not scene.task.counts.found


def test_timers_come_after_a_read_that_failed_while_they_were_counted(scene: Scene) -> None:
    scene.broker.timer("k", NOW + HOUR)
    scene.archive()
    lost = FaultRule(Fault.LOST_BEFORE, frozenset({"get_range"}), "timer/*", times=1)
    scene.start(FaultStore(scene.store, [lost]))
    with pytest.raises(UnavailableError):
        run_pass(scene.task, scene.commits.refresh)
    scene.run(NOW + 60_000)
    assert scene.target.counts == {"k": 1}


def test_a_message_that_was_missing_is_looked_for_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read too early, before the queue had it again after its log was cut."""
    monkeypatch.setattr(timer_object, "PAGE_ROWS", 4)
    for number in range(40):
        scene.broker.timer(f"k{number}", NOW + HOUR + 1000 * number)
    scene.archive()
    scene.settings = TimerSettings(ahead_ms=HOUR, rate_per_s=1)
    scene.start()
    monkeypatch.setattr(
        scene.task, "_read", lambda places: scene._read(places[: 39 if len(places) == 40 else 40])
    )
    scene.run(NOW + 60_000)
    assert scene.target.counts == dict.fromkeys((f"k{number}" for number in range(40)), 1)


def test_timers_of_a_commit_that_is_lost_come_after_a_repair(scene: Scene) -> None:
    """Its messages are found again, and the broker still has them."""
    scene.broker.timer("a", NOW + HOUR)
    scene.archive()
    scene.broker.timer("b", NOW + 2 * HOUR)
    before = scene.state.version
    scene.archive()
    for version in range(before + 1, scene.state.version + 1):
        flip(scene.store, catalog_key(version), 60)
    apply_repair(plan_repair(scene.store, (CLUSTER, BROKER), scene.now_ms, applies=True))
    scene.archive()
    scene.start()
    scene.run(NOW + 3 * HOUR, 60_000)
    assert scene.target.counts == {"a": 1, "b": 1}
    scene.check()


def test_messages_in_memory_are_bounded_by_their_bytes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_delivery, "AHEAD_BYTES", 20 * 1024)
    for number in range(200):
        scene.broker.timer(f"k{number}", NOW + HOUR)
    scene.archive()
    scene.start()
    reads: list[int] = []
    monkeypatch.setattr(scene.task, "_read", lambda places: reads.append(len(places)) or scene._read(places))
    scene.run(NOW + 60_000, 60_000)
    assert len(scene.target.sent) == 200
    assert reads[0] == 64 and set(reads[1:-1]) == {reads[1]} and 20 < reads[1] < 40


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
    five = 72 * HOUR
    assert horizon_ms(NOW, 0, five) == NOW + 1
    assert horizon_ms(NOW, HOUR, 0) == NOW + 1
    assert NOW + HOUR - 60_000 < horizon_ms(NOW, HOUR, five) <= NOW + HOUR
    assert horizon_ms(NOW, HOUR, 10_000) == (NOW + 9_000) // 2_250 * 2_250


def test_merges_take_objects_of_one_size() -> None:
    refs = [TimerRef(1, number, 0, 9, 10, 0, 0, 99, 9) for number in range(FAN_IN)]
    assert to_merge(refs[1:]) == []
    assert to_merge([*refs, TimerRef(1, 99, 0, 9, 10_000, 0, 0, 99, 9)]) == refs
    assert to_merge([ref.moved(0, 1) for ref in refs]) == []
    large = [[ref._replace(entries=entries) for ref in refs] for entries in (260_000, 270_000)]
    assert [to_merge(some) for some in large] == [large[0], []]
    mostly = TimerRef(1, 99, 0, 9, 10_000, 5_001, 5_001, 99, 9)
    assert to_merge([mostly]) == [mostly]
    assert to_merge([mostly.moved(5_000, 5_000)]) == [] == to_merge([mostly._replace(entries=FAN_IN**3)])
    assert to_merge([ref._replace(entries=15 + ref.number % 2) for ref in refs]) == []


def tiered(scene: Scene, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The document of a command, or its exit code."""
    code = main(["timers", arguments[0], scene.url, *arguments[1:], "--json"])
    out = capsys.readouterr().out
    return json.loads(out) if code == 0 else code


def test_timers_are_cancelled_and_moved_until_their_hand_over(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        scene.broker.timer(f"k{number}", NOW + (5 + number) * HOUR)
    scene.archive()
    scene.start()
    hours = [{"hourMs": (NOW // HOUR + 5 + at) * HOUR, "pending": 1} for at in range(4)]
    numbers = {"pending": 4, "postponed": 0, "refused": 0, "objects": 1}
    assert tiered(scene, capsys, "stats") == numbers | {"hours": hours}
    assert [(row["uniqKey"], row["topic"], row["place"]) for row in tiered(scene, capsys, "ls")] == [
        (f"k{at}", "orders", f"0:{at}") for at in range(4)
    ]
    cancelled = {"count": 1, "wereMs": [NOW + 6 * HOUR], "deliverMs": None}
    assert tiered(scene, capsys, "cancel", "mails", "k1") == 3
    assert tiered(scene, capsys, "cancel", "orders", "k1") == cancelled
    commits = MaintenanceCommit.opened(scene.store, scene.state, "timers", Clock(wall_ms=lambda: NOW))
    assert change_timers(commits, TimerName("orders", "k2"), at_ms=NOW + 20 * HOUR) == [NOW + 7 * HOUR]
    assert change_timers(commits, TimerPlace(0, 2), at_ms=NOW + 9 * HOUR) == [NOW + 20 * HOUR]
    assert tiered(scene, capsys, "show", "orders", "k1") == 3 == tiered(scene, capsys, "cancel", "0:1")
    assert [row["uniqKey"] for row in tiered(scene, capsys, "ls", "--limit", "9")] == ["k0", "k3", "k2"]
    assert tiered(scene, capsys, "stats")["pending"] == 3
    scene.run(NOW + 7 * HOUR + 61_000, 60_000)
    assert tiered(scene, capsys, "cancel", "0:3") == 3  # handed over an hour ahead
    scene.run(NOW + 21 * HOUR, 60_000)
    assert scene.target.counts == {"k0": 1, "k2": 1, "k3": 1}
    assert {found[1]: found[3] for found in scene.target.stored}["k2"] == NOW + 9 * HOUR
    assert scene.state.timers == ()
    scene.check()


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("1767225600", "so use 1767225600000"),
        ("2100-01-01", "years 2000 to 2099"),
        ("2050-01-01", "later than timers.max_delay_ms allows"),
    ],
)
def test_a_timer_is_not_moved_out_of_a_century(
    at: str, words: str, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.broker.timer("k", NOW + 5 * HOUR)
    scene.archive()
    with suppress(SystemExit):
        assert main(["timers", "cancel", scene.url, "orders", "k", "--at", at]) == 2
    assert words in capsys.readouterr().err
    assert tiered(scene, capsys, "stats")["pending"] == 1


FIELD = [("reminders", f"reminder-{at}") for at in range(5)] + [("mails", "other topic")]


def test_messages_of_one_batch_have_one_key_and_are_as_many_timers(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """As brokers before 5.4 give all messages of a Java batch one UNIQ_KEY, and a Message that is sent again keeps its
    own. A time in seconds is refused."""
    for topic, body in FIELD:
        properties = {
            "UNIQ_KEY": "FD00AE90005",
            "TIERED_TOPIC": topic,
            "TIERED_DELIVER_MS": str(NOW + 5 * HOUR),
        }
        scene.broker.send_with(properties, body=body)
    seconds = {"UNIQ_KEY": "S1", "TIERED_TOPIC": "reminders", "TIERED_DELIVER_MS": str(NOW // 1000)}
    scene.broker.send_with(seconds, body="seconds")
    scene.archive()
    found = tiered(scene, capsys, "stats")
    assert (found["pending"], found["refused"]) == (6, 1)
    assert len(tiered(scene, capsys, "ls")) == 6 == len({row["place"] for row in tiered(scene, capsys, "ls")})
    (refused,) = tiered(scene, capsys, "ls", "--refused")
    assert (refused["uniqKey"], "looks like seconds" in refused["why"]) == ("S1", True)
    assert (
        tiered(scene, capsys, "cancel", "reminders", "FD00AE90005", "--at", str(wall_ms() + HOUR))["count"]
        == 5
    )
    scene.start()
    scene.run(NOW + 5 * HOUR, 60_000)
    assert [(topic, body[:11]) for _, topic, body in scene.target.sent] == [("mails", "other topic")]
    scene.now_ms = wall_ms()
    scene.run(scene.now_ms + 60_000, 60_000)
    assert sorted((topic, body[:-2]) for _, topic, body in scene.target.sent) == sorted(FIELD)
    scene.check()


def test_what_the_broker_refuses_for_long_ends_and_is_listed(
    scene: Scene, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    scene.settings = TimerSettings(ahead_ms=HOUR, refused_ttl_ms=HOUR)
    for number in range(300):
        scene.broker.timer(f"k{number}", NOW + 2 * HOUR)
    scene.archive()
    scene.start()
    scene.target.refusal = lambda send: f"topic {'x' * 28_000} does not exist"
    scene.run(NOW + 2 * HOUR + HOUR // 2, 60_000)
    assert scene.task.status().postponed == 300 == tiered(scene, capsys, "stats")["postponed"]
    scene.run(NOW + 3 * HOUR + 20 * 60_000, 60_000)
    tried = scene.target.refusals
    status, stats = scene.task.status(), tiered(scene, capsys, "stats")
    assert (status.pending, status.postponed, status.refused) == (0, 0, 300)
    assert (stats["pending"], stats["postponed"], stats["refused"]) == (0, 0, 300)
    listed = tiered(scene, capsys, "ls", "--refused", "--limit", "999")
    assert len(listed) == 300 and "the broker refused it" in listed[0]["why"]
    assert sum(len(record.getMessage()) for record in caplog.records) < 4_000
    scene.run(NOW + 5 * HOUR, 60_000)
    assert scene.target.refusals == tried and not scene.target.sent
    assert scene.state.timers == () and not scene.task.status().refused
    scene.check()


def test_pending_timers_move_to_the_gateway_topic_of_another_broker(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that were delivered or cancelled do not, nor does a cancellation."""
    for number in range(6):
        scene.broker.timer(f"k{number}", NOW + (number + 1) * HOUR)
    scene.broker.send_with(cancel_properties("orders", NOW + 5 * HOUR, "k4"))
    scene.archive()
    scene.start()
    change_timers(scene.commits, TimerPlace(0, 5), at_ms=NOW + 99 * HOUR)
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
        (f"k{at}", "orders", str(NOW + hours * HOUR)) for at, hours in ((2, 3), (3, 4), (5, 99))
    ]

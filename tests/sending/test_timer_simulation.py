"""No timer is lost, early, or sent twice, in any of many seeded runs; and each classic defect is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rocketmq_tiered.sending import timer_delivery
from rocketmq_tiered.sending.timer_broker import RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import TimerDelivery
from tests.sending import timer_simulation
from tests.sending.timer_simulation import World
from tests.sweeps import sweep
from tiered.archive import timers as timer_files
from tiered.catalog.commit import CommitInvalidError
from tiered.model.timer import HOUR_MS, EntryKind

PART = 100
NOTICED_WITHIN = 200


@pytest.mark.parametrize("first", sweep(range(0, 10_000, PART), fast=[0]))
def test_every_timer_comes_once_at_its_time(first: int) -> None:
    for seed in range(first, first + PART):
        try:
            World(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


Patch = Callable[[pytest.MonkeyPatch], None]


def off_by_one_hour(patch: pytest.MonkeyPatch) -> None:
    right = timer_delivery.horizon_ms
    patch.setattr(timer_delivery, "horizon_ms", lambda *given: right(*given) + HOUR_MS)


def a_delivery_time_of_the_hour(patch: pytest.MonkeyPatch) -> None:
    right = timer_delivery.timer_send
    patch.setattr(
        timer_delivery, "timer_send", lambda m, ms, **more: right(m, ms // HOUR_MS * HOUR_MS, **more)
    )


def progress_before_the_send(patch: pytest.MonkeyPatch) -> None:
    right = timer_delivery._claims

    def claims(entries: Any, **more: Any) -> Any:
        return [ref.moved(ref.claimed, ref.claimed) for ref in right(entries, **more)]

    def step(self: TimerDelivery, state: Any, plan: Any) -> bool:
        try:
            return right_step(self, state, plan)
        finally:
            self._over.clear()

    right_step = TimerDelivery.step
    patch.setattr(timer_delivery, "_claims", claims)
    patch.setattr(TimerDelivery, "step", step)


def a_cancellation_after_the_plan_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    right = TimerDelivery._commit

    def commit(self: TimerDelivery, state: Any, claims: Any, entries: Any = None) -> bool:
        return right(self, state, claims, None)

    patch.setattr(TimerDelivery, "_commit", commit)


def the_wheel_topic_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RemoteTimerBroker, "has", lambda self, topic, key: self._has(topic, key))


def the_real_topic_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RemoteTimerBroker, "has", lambda self, topic, key: self._has("rmq_sys_wheel_timer", key))


def asked_before_dispatch_caught_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RemoteTimerBroker, "is_settled", lambda self: True)


def asked_while_sends_may_still_land(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(timer_delivery, "SETTLE_S", 0.0)


def asked_while_the_other_owner_may_send(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimerDelivery, "_is_settled", lambda self: self._broker.is_settled())


def doubt_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimerDelivery, "_was_sent", lambda self, send: False)


def rounded_down_to_seconds(patch: pytest.MonkeyPatch) -> None:
    right = timer_delivery.timer_send
    patch.setattr(timer_delivery, "timer_send", lambda m, ms, **more: right(m, ms // 1000 * 1000, **more))


def catching_up_out_of_order(patch: pytest.MonkeyPatch) -> None:
    right = timer_delivery.sort_out

    def reversed_timers(entries: Any) -> Any:
        found = right(entries)
        return found._replace(timers=found.timers[::-1])

    patch.setattr(timer_delivery, "sort_out", reversed_timers)


def the_longest_delay_by_the_wrong_clock(patch: pytest.MonkeyPatch) -> None:
    right = timer_simulation.timer_of

    def earlier(pairs: Any, *, stored_ms: int, **more: Any) -> Any:
        return right(pairs, stored_ms=stored_ms - HOUR_MS - 1, **more)

    patch.setattr(timer_simulation, "timer_of", earlier)


def a_cancelled_one_is_sent_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    right = TimerDelivery._hand_over

    def hand_over(self: TimerDelivery, entries: Any, until_s: float, *, is_doubt: bool) -> Any:
        if is_doubt:
            entries = entries._replace(table=entries.table[entries.table["kind"] != EntryKind.CANCEL])
        return right(self, entries, until_s, is_doubt=is_doubt)

    patch.setattr(TimerDelivery, "_hand_over", hand_over)


def a_cancellation_ends_later_timers_too(patch: pytest.MonkeyPatch) -> None:
    def sort_out(entries: Any) -> Any:
        changed = entries.copy()
        changed["order"] = np.where(
            changed["kind"] == EntryKind.CANCEL, changed["order"] - 8, changed["order"]
        )
        return timer_files.sort_out(changed)

    patch.setattr(timer_delivery, "sort_out", sort_out)


def the_position_of_another_hour(patch: pytest.MonkeyPatch) -> None:
    right = timer_delivery._claims

    def claims(entries: Any, **more: Any) -> Any:
        return [
            ref.moved(ref.done, min(ref.entries, ref.claimed + (ref.claimed < ref.entries)))
            for ref in right(entries, **more)
        ]

    patch.setattr(timer_delivery, "_claims", claims)


DEFECTS: Sequence[Patch] = (
    off_by_one_hour,
    a_delivery_time_of_the_hour,
    progress_before_the_send,
    a_cancellation_after_the_plan_is_not_seen,
    the_wheel_topic_is_not_asked,
    the_real_topic_is_not_asked,
    asked_before_dispatch_caught_up,
    asked_while_sends_may_still_land,
    asked_while_the_other_owner_may_send,
    doubt_is_not_asked,
    rounded_down_to_seconds,
    catching_up_out_of_order,
    the_longest_delay_by_the_wrong_clock,
    a_cancelled_one_is_sent_after_a_restart,
    a_cancellation_ends_later_timers_too,
    the_position_of_another_hour,
)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_noticed(defect: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    _noticed({})


@pytest.mark.parametrize(
    "world", [{"standby_delivers": True}, {"is_torn": True}], ids=lambda world: next(iter(world))
)
def test_a_defect_beside_the_task_is_noticed(world: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby delivers too; an hour is committed before its messages."""
    if "standby_delivers" in world:
        monkeypatch.setattr(timer_delivery, "Requirements", lambda **_: timer_simulation.Requirements())
    _noticed(world)


def _noticed(world: dict[str, bool]) -> None:
    for seed in range(NOTICED_WITHIN):
        try:
            World(seed, **world).run()
        except (AssertionError, CommitInvalidError):
            return
    raise AssertionError(f"not noticed in {NOTICED_WITHIN} seeds")

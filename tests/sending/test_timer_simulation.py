"""No timer is lost, early, or sent twice, in any of many seeded runs; and each classic defect is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rocketmq_tiered.sending import timer_delivery
from rocketmq_tiered.sending.timer_broker import WHEEL_TOPIC, RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import TimerDelivery
from tests.archive.timer_fates import entries_of
from tests.sending import timer_simulation
from tests.sending.timer_simulation import World
from tests.sweeps import sweep
from tiered.archive import timers as timer_files
from tiered.catalog.commit import CommitInvalidError
from tiered.model.timer import CANCELS, HOUR_MS, EntryKind

PART = 50
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
        timer_delivery,
        "timer_send",
        lambda m, ms, *args, **more: right(m, ms // HOUR_MS * HOUR_MS, *args, **more),
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


def without(patch: pytest.MonkeyPatch, is_skipped: Callable[[str], bool]) -> None:
    right = RemoteTimerBroker._found

    def found(self: RemoteTimerBroker, topic: str, send: Any) -> set[str]:
        return set() if is_skipped(topic) else right(self, topic, send)

    patch.setattr(RemoteTimerBroker, "_found", found)


def the_wheel_topic_is_not_searched(patch: pytest.MonkeyPatch) -> None:
    without(patch, lambda topic: topic == WHEEL_TOPIC)


def the_real_topic_is_not_searched(patch: pytest.MonkeyPatch) -> None:
    without(patch, lambda topic: topic != WHEEL_TOPIC)


def identity_by_key(patch: pytest.MonkeyPatch) -> None:
    """A message with the key, in the topic, is the timer."""
    patch.setattr(
        RemoteTimerBroker,
        "has",
        lambda self, send: any(
            True for topic in (WHEEL_TOPIC, send.message.topic) for _ in self._with_key(topic, send.key)
        ),
    )


def the_answer_to_a_key_is_all(patch: pytest.MonkeyPatch) -> None:
    """Of many messages with a key the broker returns some."""
    patch.setattr(timer_simulation.ModelBroker, "_since", lambda self, topic, since_ms: iter(()))


def sent_keys_instead_of_places(patch: pytest.MonkeyPatch) -> None:
    right = TimerDelivery._was_sent

    def was_sent(self: TimerDelivery, send: Any) -> bool:
        keys = self.__dict__.setdefault("_keys", set())
        found = (send.deliver_ms, send.key) in keys or right(self, send)
        keys.add((send.deliver_ms, send.key))
        return found

    patch.setattr(TimerDelivery, "_was_sent", was_sent)


def the_first_of_a_key_and_a_time(patch: pytest.MonkeyPatch) -> None:
    """A producer that sends again is taken to mean the same."""
    right = timer_delivery.sort_out

    def first(entries: Any) -> Any:
        found = right(entries)
        names = found.timers[["deliver_ms", "key_hash"]]
        return found._replace(timers=found.timers[np.sort(np.unique(names, return_index=True)[1])])

    patch.setattr(timer_delivery, "sort_out", first)


def cancel_by_key_over_topics(patch: pytest.MonkeyPatch) -> None:
    def sort_out(entries: Any) -> Any:
        table = entries.table.copy()
        table["topic"] = 0
        found = timer_files.sort_out(entries._replace(table=table))
        picked = [entries.table[np.isin(entries.table["order"], part["order"])] for part in found]
        kinds = [part["kind"] for part in found]
        return timer_files.Sorted(
            *(some[np.isin(some["kind"], kind)] for some, kind in zip(picked, kinds, strict=True))
        )

    patch.setattr(timer_delivery, "sort_out", sort_out)


def a_place_cancels_all_of_its_key(patch: pytest.MonkeyPatch) -> None:
    def sort_out(entries: Any) -> Any:
        table = entries.table.copy()
        table["kind"][table["kind"] == EntryKind.CANCEL_PLACE] = EntryKind.CANCEL
        return timer_files.sort_out(entries._replace(table=table))

    patch.setattr(timer_delivery, "sort_out", sort_out)


def counts_before_cancels(patch: pytest.MonkeyPatch) -> None:
    def counts(self: timer_files.TimerFiles, state: Any) -> Any:
        kind = entries_of(self, state.timers)["kind"]
        timers = int(np.isin(kind, [EntryKind.TIMER, EntryKind.POSTPONED]).sum())
        postponed = int((kind == EntryKind.POSTPONED).sum())
        return timer_files.TimerCounts({0: timers}, postponed)

    patch.setattr(timer_files.TimerFiles, "counts", counts)


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
    patch.setattr(
        timer_delivery, "timer_send", lambda m, ms, *args, **more: right(m, ms // 1000 * 1000, *args, **more)
    )


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
            entries = entries._replace(table=entries.table[~np.isin(entries.table["kind"], CANCELS)])
        return right(self, entries, until_s, is_doubt=is_doubt)

    patch.setattr(TimerDelivery, "_hand_over", hand_over)


def a_cancellation_ends_later_timers_too(patch: pytest.MonkeyPatch) -> None:
    def sort_out(entries: Any) -> Any:
        changed = entries.table.copy()
        changed["order"] -= 8 * np.isin(changed["kind"], CANCELS)
        return timer_files.sort_out(entries._replace(table=changed))

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
    the_wheel_topic_is_not_searched,
    the_real_topic_is_not_searched,
    identity_by_key,
    the_answer_to_a_key_is_all,
    sent_keys_instead_of_places,
    the_first_of_a_key_and_a_time,
    cancel_by_key_over_topics,
    a_place_cancels_all_of_its_key,
    counts_before_cancels,
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

"""No timer is lost, early, or sent twice, in any of many seeded runs; and each classic defect is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rocketmq_tiered.sending import timer_delivery
from rocketmq_tiered.sending.timer_broker import WHEEL_TOPIC, RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import TimerDelivery
from tests.archive.timer_fates import entries_of
from tests.sending import timer_simulation
from tests.sending.timer_defects import (
    by_key,
    changed_table,
    is_found,
    over_places,
    progress_before_the_send,
    with_time,
)
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


def over_topics(right: Any) -> Any:
    groups = timer_files._groups

    def sort_out(entries: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timer_files, "_groups", lambda columns: groups([*columns[:2], *columns[3:]]))
            return right(entries)

    return sort_out


def of_later_timers(table: Any) -> None:
    table["physical_offset"] -= 8 * np.isin(table["kind"], CANCELS)


def sent_keys(right: Any) -> Any:
    def was_sent(self: TimerDelivery, send: Any) -> bool:
        keys = self.__dict__.setdefault("_keys", set())
        found = (send.deliver_ms, send.key) in keys or right(self, send)
        keys.add((send.deliver_ms, send.key))
        return found

    return was_sent


def first_of_a_name(right: Any) -> Any:
    """A producer that sends again is taken to mean the same."""

    def first(entries: Any) -> Any:
        found = right(entries)
        names = found.timers[["deliver_ms", "key_hash"]]
        return found._replace(timers=found.timers[np.sort(np.unique(names, return_index=True)[1])])

    return first


def before_cancels(right: Any) -> Any:
    def counts(self: timer_files.TimerFiles, state: Any) -> Any:
        kind = entries_of(self, state.timers)["kind"]
        timers = int(np.isin(kind, [EntryKind.TIMER, EntryKind.POSTPONED]).sum())
        return timer_files.TimerCounts({0: timers}, int((kind == EntryKind.POSTPONED).sum()))

    return counts


def without_cancels_in_doubt(right: Any) -> Any:
    def hand_over(self: TimerDelivery, entries: Any, claims: Any, *, is_doubt: bool) -> Any:
        if is_doubt:
            entries = entries._replace(table=entries.table[~np.isin(entries.table["kind"], CANCELS)])
        return right(self, entries, claims, is_doubt=is_doubt)

    return hand_over


def backwards(right: Any) -> Any:
    def sort_out(entries: Any) -> Any:
        found = right(entries)
        return found._replace(timers=found.timers[::-1])

    return sort_out


def one_row_more(right: Any) -> Any:
    return lambda entries, **more: [
        ref.moved(ref.done, min(ref.entries, ref.claimed + (ref.claimed < ref.entries)))
        for ref in right(entries, **more)
    ]


DEFECTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "off by one hour": (timer_delivery, "horizon_ms", lambda right: lambda *given: right(*given) + HOUR_MS),
    "a delivery time of the hour": (
        timer_delivery,
        "timer_send",
        with_time(lambda ms: ms // HOUR_MS * HOUR_MS),
    ),
    "rounded down to seconds": (timer_delivery, "timer_send", with_time(lambda ms: ms // 1000 * 1000)),
    "progress before the send": (TimerDelivery, "_hand_over", progress_before_the_send),
    "a cancellation after the plan is not seen": (
        TimerDelivery,
        "_commit",
        lambda right: lambda self, state, claims, entries=None: right(self, state, claims),
    ),
    "the wheel topic is not searched": (
        RemoteTimerBroker,
        "_places_found",
        is_found(lambda topic: topic != WHEEL_TOPIC),
    ),
    "the real topic is not searched": (
        RemoteTimerBroker,
        "_places_found",
        is_found(lambda topic: topic == WHEEL_TOPIC),
    ),
    "identity by key": (RemoteTimerBroker, "has", by_key),
    "the answer to a key is all": (
        timer_simulation.ModelBroker,
        "_places_since",
        lambda right: lambda self, topic, since_ms: iter(()),
    ),
    "sent keys instead of places": (TimerDelivery, "_was_sent", sent_keys),
    "the first of a key and a time": (timer_delivery, "sort_out", first_of_a_name),
    "cancel by key over topics": (timer_delivery, "sort_out", over_topics),
    "a place cancels all of its key": (timer_delivery, "sort_out", changed_table(over_places)),
    "a cancellation ends later timers too": (timer_delivery, "sort_out", changed_table(of_later_timers)),
    "counts before cancels": (timer_files.TimerFiles, "counts", before_cancels),
    "asked before dispatch caught up": (RemoteTimerBroker, "is_settled", lambda right: lambda self: True),
    "asked while sends may still land": (timer_delivery, "SETTLE_S", lambda right: 0.0),
    "asked while the other owner may send": (
        TimerDelivery,
        "_is_settled",
        lambda right: lambda self: self._broker.is_settled(),
    ),
    "doubt is not asked": (TimerDelivery, "_was_sent", lambda right: lambda self, send: False),
    "catching up out of order": (timer_delivery, "sort_out", backwards),
    "the longest delay by the wrong clock": (
        timer_simulation,
        "timer_of",
        lambda right: (
            lambda pairs, *, stored_ms, **more: right(pairs, stored_ms=stored_ms - HOUR_MS - 1, **more)
        ),
    ),
    "a cancelled one is sent after a restart": (TimerDelivery, "_hand_over", without_cancels_in_doubt),
    "the position of another hour": (timer_delivery, "_claims", one_row_more),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, change = DEFECTS[defect]
    monkeypatch.setattr(where, name, change(getattr(where, name)))
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

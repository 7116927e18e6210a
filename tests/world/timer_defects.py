"""Defects of the delivery of timers, which simulations plant: each makes a wrong function of the right one."""

from collections.abc import Callable
from typing import Any

from rocketmq_tiered.sending.timer_broker import WHEEL_TOPIC
from rocketmq_tiered.sending.timer_delivery import TimerDelivery
from tiered.model.timer import EntryKind


def changed_table(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """``sort_out`` of entries that ``change`` has changed."""

    def of(right: Any) -> Any:
        def sort_out(entries: Any) -> Any:
            table = entries.table.copy()
            change(table)
            return right(entries._replace(table=table))

        return sort_out

    return of


def over_places(table: Any) -> None:
    table["kind"][table["kind"] == EntryKind.CANCEL_PLACE] = EntryKind.CANCEL


def is_found(topic_is_searched: Callable[[str], bool]) -> Callable[[Any], Any]:
    return lambda right: (
        lambda self, topic, send: right(self, topic, send) if topic_is_searched(topic) else set()
    )


def progress_before_the_send(right: Any) -> Any:
    def hand_over(self: TimerDelivery, entries: Any, claims: Any, **more: Any) -> Any:
        claims[:] = [ref.moved(ref.claimed, ref.claimed) for ref in claims]
        assert self._commit(self._commits.state, claims)
        return right(self, entries, claims, **more)

    return hand_over


def by_key(right: Any) -> Any:
    """A message with the key, in the topic, is the timer."""
    return lambda self, send: any(
        True for topic in (WHEEL_TOPIC, send.message.topic) for _ in self._places_with_key(topic, send.key)
    )


def with_time(change: Callable[[int], int]) -> Callable[[Any], Any]:
    return lambda right: lambda message, ms, *args, **more: right(message, change(ms), *args, **more)

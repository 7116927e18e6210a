"""Retires a broker, step by step, and takes it back.

    permission 4 → clients have read the route, nothing produced → nothing left → permission 0 → what was popped is
    acknowledged, or else 4 again → commits settled → broker stopped → archived to the end, retired → announced

The broker's permission says how far an earlier run came. Nothing is stored beside it: stopped anywhere, the next run
continues. Reads come before every change.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from rocketmq_tiered.process.broker_control import (
    PERM_NONE,
    PERM_READ,
    PERM_READ_WRITE,
    BrokerControl,
    Leftover,
)
from tiered.clock import Clock
from tiered.errors import UnavailableError

ROUTE_POLL_S: Final = 30.0
"""Clients read routes this often (pollNameServerInterval)."""
QUIET_S: Final = 10.0
"""How long nothing may be produced, and no group's offset change, before the next step."""
LOOK_S: Final = 1.0


class DetachStep(NamedTuple):
    """A step, and its state: done, or what it waits for."""

    name: str
    state: str


class LeftError(UnavailableError):
    """The broker still holds messages that only it delivers."""


class Detachment:
    """Closes one broker. ``say`` prints a step."""

    def __init__(
        self,
        broker: BrokerControl,
        wait_s: float,
        say: Callable[[DetachStep], None],
        clock: Clock,
    ) -> None:
        """``broker``: requests to the broker that is taken out of service; ``wait_s``: how long each step waits for
        clients to act; ``say`` prints a step."""
        self._broker, self._wait_s, self._say, self._clock = broker, wait_s, say, clock

    def close(self, *, force: bool) -> None:
        """Take the broker out of service, step by step, until it may be stopped: it takes no sends, then no reads, and
        has nothing left that only it can deliver. Raises LeftError if something is left after the wait, unless
        ``force`` leaves it in the archive, and UnavailableError for other waits that took too long."""
        permission = self._broker.permission()
        if permission == PERM_NONE:
            self._say(DetachStep("read-only", "done before"))
        else:
            if permission != PERM_READ:
                self._broker.set_permission(PERM_READ)
            self._say(DetachStep("read-only", "done: brokerPermission = 4; tiered detach --undo reverts it"))
            self._clock.sleep(ROUTE_POLL_S)
            self._say(DetachStep("routes", "done: clients have read that the broker takes no messages"))
            self._await_unchanged(self._broker.produced, "producers still send to the broker")
            self._say(DetachStep("log", "done: quiet"))
            self._await_empty("left", self._broker.leftovers, force=force)
            self._broker.set_permission(PERM_NONE)
        self._say(DetachStep("closed", "done: brokerPermission = 0"))
        self._await_unchanged(
            self._broker.group_offsets, "offsets of consumer groups still change at the broker"
        )
        if self._broker.popped():
            self._await_empty("popped", self._broker.popped, force=force)
            self._await_unchanged(
                self._broker.group_offsets,
                "popped messages that were not acknowledged still come back to the broker's retry topics",
            )
        if not force and self._broker.leftovers():  # popped messages came back: let clients read them
            self._broker.set_permission(PERM_READ)
            return self.close(force=force)
        self._say(DetachStep("commits", "done: settled"))
        return None

    def _await_empty(self, step: str, read: Callable[[], list[Leftover]], *, force: bool) -> None:
        """Wait until ``read`` returns nothing that the broker still holds, and print what is left when that changes.
        ``step`` names the step in what is printed. With ``force`` nothing is waited for. Raises LeftError if something
        is left after the wait."""
        ends_s, printed = self._clock.monotonic_s() + self._wait_s, ""
        while left := read():
            if force:
                self._say(
                    DetachStep(step, f"done: {left_text(left)} are not delivered and stay in the archive")
                )
                return
            if self._clock.monotonic_s() >= ends_s:
                raise LeftError(
                    f"the broker still holds {left_text(left)}",
                    hint="run tiered detach again later, wait longer (--wait 1h), or leave these messages undelivered "
                    "in the archive (--force)",
                )
            if (text := left_text(left)) != printed:
                self._say(DetachStep(step, f"waits for {text}"))
                printed = text
            self._clock.sleep(LOOK_S)
        self._say(DetachStep(step, "done: nothing"))

    def _await_unchanged(self, read: Callable[[], object], problem: str) -> None:
        """Wait until ``read`` has returned the same for QUIET_S. Raises UnavailableError with ``problem`` if it still
        changes after the longest wait."""
        last, since_s = read(), self._clock.monotonic_s()
        ends_s = since_s + QUIET_S + max(self._wait_s, QUIET_S)
        while self._clock.monotonic_s() - since_s < QUIET_S:
            self._clock.sleep(LOOK_S)
            if (now := read()) != last:
                last, since_s = now, self._clock.monotonic_s()
            if self._clock.monotonic_s() >= ends_s:
                raise UnavailableError(
                    problem, hint="stop the clients that use this broker, then run tiered detach again"
                )

    def undo(self) -> None:
        """Make the broker readable and writable again."""
        self._broker.set_permission(PERM_READ_WRITE)
        self._say(DetachStep("permission", "done: clients may read and write again (brokerPermission = 6)"))


def left_text(left: list[Leftover]) -> str:
    """What is left, as part of a message."""
    return ", ".join(f"{leftover.messages} {leftover.what}" for leftover in left)

"""Keeps one broker id registered at every name server, each by a connection of its own that stays open.

A name server drops a broker when its connection ends, and after two minutes without a registration. So a lost
connection is made anew at once, and what a restarted name server forgot is told again within seconds.

Owns connections and rounds. Decisions are registration.py's.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from server.proxy.inflight_limit import InflightLimit
from server.proxy.upstream import LinkEvents, RemotingUpstream
from server.slave.registration import (
    GET_BROKER_CLUSTER_INFO,
    MASTER_ID,
    Claims,
    Listing,
    Progress,
    RegistrationState,
    SlaveConfig,
    claims_in,
    listed_in,
    refusal_of_address,
    refusal_of_another_master,
    refusal_of_claims,
    refusal_of_place,
    register_command,
    unregister_command,
    wait_s,
)
from server.wire.codes import ResponseCode
from tiered.errors import CorruptionError, UnavailableError
from tiered.remoting.command import RemotingCommand

logger = logging.getLogger(__name__)

ANSWER_S = 3.0
LEAVE_S = 2.0


@dataclass(frozen=True)
class NameServerStatus:
    """How we stand with one name server, for people."""

    name_server: str
    stand: RegistrationState
    why: str


class Master(Protocol):
    """What is known of the master beside us: see master.MasterMonitor."""

    @property
    def is_well(self) -> bool:
        """Whether it answers, as far as is known."""
        ...

    @property
    def answers(self) -> int:
        """So many answers of it came."""
        ...

    def refusal(self) -> str | None:
        """Why it leaves no place for us, or None."""
        ...


class Registrar:
    """Belongs to one event loop. ``watch`` is asked in every round."""

    def __init__(self, place: SlaveConfig, period_s: float, watch: Master) -> None:
        self.watch = watch
        self.master: str | None = None
        """As name servers listed the master while it answered."""
        self._heard_of: tuple[str, int] | None = None
        self.last = Listing()
        """What a name server listed when we registered last: one that has just started knows no cluster."""
        self._was_registered = False
        self._desks = [_Desk(self, place, address, period_s) for address in place.name_servers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Register from now on."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(desk.run()) for desk in self._desks]

    def wake(self) -> None:
        """Something is known of the master that was not."""
        for desk in self._desks:
            desk.wake()

    async def leave(self) -> None:
        """Unregister everywhere and hang up; within LEAVE_S."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(desk.leave() for desk in self._desks))

    def standings(self) -> tuple[NameServerStatus, ...]:
        """Of every name server. Callable from any thread."""
        return tuple(desk.standing for desk in self._desks)

    def heard_of(self, master: str | None) -> None:
        """A name server lists this ``master`` while the one beside us counts as well. One that was not listed before is
        taken for it when it has answered since: it may have vanished unnoticed, and been replaced."""
        if master is None:
            return
        if self._heard_of is None or self._heard_of[0] != master:
            self._heard_of = master, self.watch.answers
        if self.master is None or self.watch.answers > self._heard_of[1]:
            self.master = master

    def claims(self) -> tuple[Claims, ...]:
        """Of every name server, as far as is known."""
        return tuple(desk.claims for desk in self._desks)

    @property
    def was_registered(self) -> bool:
        """Whether any name server has listed us since the start."""
        return self._was_registered

    def noted(self, progress: Progress) -> None:
        """A desk came so far."""
        self._was_registered |= progress.stand is RegistrationState.REGISTERED


class _Desk:
    """One name server."""

    def __init__(self, registrar: Registrar, place: SlaveConfig, address: str, period_s: float) -> None:
        self._registrar, self._place, self._address, self._period_s = registrar, place, address, period_s
        self._link = RemotingUpstream(address, InflightLimit(), LinkEvents(on_lost=self._lost), place.tls)
        self._progress = Progress()
        self._awake = asyncio.Event()
        self._registering: asyncio.Task[RemotingCommand] | None = None
        self.claims = Claims()
        """As it was listed last; none while it is away."""

    @property
    def standing(self) -> NameServerStatus:
        return NameServerStatus(self._address, self._progress.stand, self._progress.why)

    def wake(self) -> None:
        self._awake.set()

    async def run(self) -> None:
        while True:
            try:
                progress = await self._round()
            except Exception as error:
                # Unforeseen, and no reason to be listed on without being looked after.
                logger.exception("a round at a name server failed unexpectedly")
                progress = self._progress.failed(repr(error))
            self._enter(progress)
            try:
                async with asyncio.timeout(wait_s(self._progress, self._period_s)):
                    await self._awake.wait()
            except TimeoutError:
                continue
            self._awake.clear()
            if self._progress.stand is RegistrationState.UNREACHABLE:
                await asyncio.sleep(wait_s(self._progress, self._period_s))

    async def leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                if self._registering is not None:
                    # Taken after we have hung up, it would list us for two minutes.
                    await asyncio.wait({self._registering})
                if self._registering is not None and self._link.is_connected:
                    await self._unregister(await self._look())
        except (TimeoutError, UnavailableError, CorruptionError) as error:
            logger.info("a name server was not told that the slave ends: %s", error)
        self._progress = self._progress.left()
        self._link.close("the slave ends")

    async def _round(self) -> Progress:
        before = self._progress
        try:
            listed = await self._look()
            why = self._refusal(listed)
            if why is not None:
                await self._unregister(listed)
                return before.refused(why)
            if listed.cluster:
                self._registrar.last = listed
            else:
                listed = self._registrar.last
            self._registering = asyncio.create_task(self._told(register_command(self._place, listed)))
            self._registering.add_done_callback(_seen)
            answer = await asyncio.shield(self._registering)
            if answer.code != ResponseCode.SUCCESS:
                return before.refused(f"registering: {answer.remark or answer.code}")
            # Newer name servers answer so, too, when they have ignored it.
            listed = await self._look()
            if (why := refusal_of_address(listed, self._place)) is not None:
                # It came between the look and the registration.
                await self._unregister(listed)
                return before.refused(why)
            holder = listed.addresses.get(self._place.broker_id)
        except (UnavailableError, CorruptionError) as error:
            self.claims = Claims()
            return before.failed(str(error))
        if holder != self._place.advertise:
            return before.refused(f"the name server lists {holder or 'nobody'} as id {self._place.broker_id}")
        return before.registered()

    def _refusal(self, listed: Listing) -> str | None:
        place, registrar = self._place, self._registrar
        self.claims = claims_in(listed, place)
        is_master_well = registrar.watch.is_well
        if is_master_well:
            registrar.heard_of(listed.addresses.get(MASTER_ID))
        return (
            registrar.watch.refusal()
            or refusal_of_another_master(listed, registrar.master, is_master_well=is_master_well)
            or refusal_of_place(listed, place, was_registered=registrar.was_registered)
            or refusal_of_claims(listed, place, registrar.claims())
        )

    async def _unregister(self, listed: Listing) -> None:
        command = unregister_command(self._place, listed)
        if command is not None:
            await self._told(command)

    async def _look(self) -> Listing:
        answer = await self._told(RemotingCommand(GET_BROKER_CLUSTER_INFO, 0))
        if answer.code != ResponseCode.SUCCESS:
            raise UnavailableError(f"{self._address}: {answer.remark or answer.code}")
        return listed_in(answer.body, self._place.broker)

    async def _told(self, command: RemotingCommand) -> RemotingCommand:
        return await self._link.call(command, ANSWER_S)

    def _lost(self, why: str, had_requests: bool) -> None:
        if self._progress.stand is RegistrationState.REGISTERED:
            self._enter(self._progress.failed(why))
            self._awake.set()

    def _enter(self, progress: Progress) -> None:
        before, self._progress = self._progress, progress
        self._registrar.noted(progress)
        if (before.stand, before.why) == (progress.stand, progress.why):
            return
        level = logging.INFO if progress.stand is RegistrationState.REGISTERED else logging.WARNING
        logger.log(
            level, "slave %s", progress.stand.value,
            extra={"name_server": self._address, "id": self._place.broker_id, "why": progress.why},
        )  # fmt: skip


def _seen(task: asyncio.Task[RemotingCommand]) -> None:
    """Its failure is told to who waits; who leaves does not ask."""
    if not task.cancelled():
        task.exception()

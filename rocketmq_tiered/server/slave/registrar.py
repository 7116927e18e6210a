"""Keeps one broker id registered at every name server, each over its own open connection.

A name server drops a broker when its connection ends, and after two minutes without a registration. So lost connections
are reopened at once, and a restarted name server gets a new registration within seconds. Decisions are in
registration.py.
"""

import asyncio
import logging

from rocketmq_tiered.server.proxy.upstream import (
    InflightLimit,
    LinkEvents,
    RemotingUpstream,
    retrieve_exception,
)
from rocketmq_tiered.server.slave.master_monitor import MasterMonitor
from rocketmq_tiered.server.slave.registration import (
    MASTER_ID,
    Claims,
    Listing,
    RegistrationProgress,
    RegistrationState,
    SlaveConfig,
    address_refusal,
    claims_in,
    claims_refusal,
    listing_refusal,
    new_master_refusal,
    parse_listing,
    register_command,
    unregister_command,
    wait_s,
)
from tiered.errors import CorruptionError, UnavailableError
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

logger = logging.getLogger(__name__)

ANSWER_S = 3.0
LEAVE_S = 2.0


class Registrar:
    """Belongs to one event loop. What is registered, and when not to, is the subclass's."""

    what = "registration"
    """What messages call it."""

    def __init__(self, slave: SlaveConfig, period_s: float) -> None:
        """``slave``: what is registered, and the name servers; ``period_s``: the time between two registrations at a
        name server."""
        self.slave = slave
        self.last = Listing()
        """The listing at the last registration: a name server that has just started knows no cluster."""
        self.was_registered = False
        """Whether any name server has listed this process since the start."""
        self._sessions = [_Session(self, address, period_s) for address in slave.name_servers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Register, and keep registering."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(session.run()) for session in self._sessions]

    def wake(self) -> None:
        """Start the next round at every name server now."""
        for session in self._sessions:
            session.wake()

    async def leave(self) -> None:
        """Unregister everywhere and close the connections, within LEAVE_S."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(session.leave() for session in self._sessions))

    def statuses(self) -> tuple[RegistrationProgress, ...]:
        """The progress at every name server, in the order of the settings. Callable from any thread."""
        return tuple(session.progress for session in self._sessions)

    def claims(self) -> tuple[Claims, ...]:
        """The claims at every name server, as last listed."""
        return tuple(session.claims for session in self._sessions)

    def note(self, progress: RegistrationProgress) -> None:
        """A session has progressed."""
        self.was_registered |= progress.state is RegistrationState.REGISTERED

    def refusal(self, listed: Listing) -> str | None:
        """Why not to register at a name server with this listing, or None."""
        raise NotImplementedError

    def registration(self, listed: Listing) -> RemotingCommand:
        """The request that registers."""
        raise NotImplementedError

    def withdrawal(self, listed: Listing) -> RemotingCommand | None:
        """The request that unregisters, if there is something to unregister."""
        return unregister_command(self.slave, listed)


class SlaveRegistrar(Registrar):
    """A slave without topics. ``monitor`` is checked in every round."""

    what = "slave"

    def __init__(self, slave: SlaveConfig, period_s: float, monitor: MasterMonitor) -> None:
        super().__init__(slave, period_s)
        self.monitor = monitor
        self.master: str | None = None
        """The master's address as listed while it answered."""
        self._candidate: tuple[str, int] | None = None

    def _note_master(self, address: str | None) -> None:
        """Note that a name server lists a master at ``address``, while the master beside this process counts as
        available. A new address is taken as that master's once it has answered after the address was first listed:
        before that it may have vanished unnoticed and been replaced by another one."""
        if address is None:
            return
        if self._candidate is None or self._candidate[0] != address:
            self._candidate = address, self.monitor.answers
        if self.master is None or self.monitor.answers > self._candidate[1]:
            self.master = address

    def refusal(self, listed: Listing) -> str | None:
        """Return why this process is not to be registered at a name server with this listing, None if it is. The
        master's own objections come first."""
        is_master_available = self.monitor.is_available
        if is_master_available:
            self._note_master(listed.addresses.get(MASTER_ID))
        return (
            self.monitor.refusal()
            or new_master_refusal(listed, self.master, is_master_available=is_master_available)
            or listing_refusal(listed, self.slave, was_registered=self.was_registered)
            or claims_refusal(listed, self.slave, self.claims())
        )

    def registration(self, listed: Listing) -> RemotingCommand:
        return register_command(self.slave, listed)


class _Session:
    """One name server."""

    def __init__(self, registrar: Registrar, address: str, period_s: float) -> None:
        """``registrar`` has the data to register; ``address``: the name server's, to which the first registration
        connects; ``period_s``: between two registrations."""
        self._registrar, self._slave, self._address, self._period_s = (
            registrar,
            registrar.slave,
            address,
            period_s,
        )
        events = LinkEvents(on_lost=self._lost)
        self._link = RemotingUpstream(address, InflightLimit(), events, registrar.slave.tls)
        self.progress = RegistrationProgress()
        self._awake = asyncio.Event()
        self._registering: asyncio.Task[RemotingCommand] | None = None
        self.claims = Claims()
        """The brokers that claim this one's id or address in the newest list of this name server; none while it does
        not answer."""

    def wake(self) -> None:
        self._awake.set()

    async def run(self) -> None:
        """Register at the name server after each period, and at once when the connection was lost or ``wake`` is
        called; until cancelled."""
        while True:
            try:
                progress = await self._register_once()
            except Exception as error:
                # Unexpected: keep maintaining the registration.
                logger.exception(
                    "registering at name server %s failed because of an unexpected error, and the next attempt follows",
                    self._address,
                )
                progress = self.progress.failed(repr(error))
            self._enter(progress)
            try:
                async with asyncio.timeout(wait_s(self.progress, self._period_s)):
                    await self._awake.wait()
            except TimeoutError:
                continue
            self._awake.clear()
            if self.progress.state is RegistrationState.UNREACHABLE:
                await asyncio.sleep(wait_s(self.progress, self._period_s))

    async def leave(self) -> None:
        """Unregister at the name server, within LEAVE_S, and close the connection. One that does not answer drops the
        registration two minutes later."""
        try:
            async with asyncio.timeout(LEAVE_S):
                if self._registering is not None:
                    # A registration that is processed after the connection has closed stays for two minutes.
                    await asyncio.wait({self._registering})
                if self._registering is not None and self._link.is_connected:
                    await self._unregister(await self._listing())
        except (TimeoutError, UnavailableError, CorruptionError) as error:
            logger.info(
                "name server %s lists this process for two more minutes, as it could not be unregistered: %s",
                self._address,
                error,
            )
        self.progress = self.progress.left()
        self._link.close("the service stops")

    async def _register_once(self) -> RegistrationProgress:
        """Read what the name server lists for the broker, register if that is allowed and unregister if not, and check
        in the listing that the name server took it. Returns the outcome; errors of the connection are one, too."""
        before = self.progress
        try:
            listed = await self._listing()
            self.claims = claims_in(listed, self._slave)
            why = self._registrar.refusal(listed)
            if why is not None:
                await self._unregister(listed)
                return before.refused(why)
            if listed.cluster:
                self._registrar.last = listed
            else:
                listed = self._registrar.last
            self._registering = asyncio.create_task(self._call(self._registrar.registration(listed)))
            self._registering.add_done_callback(retrieve_exception)  # ``leave`` does not await it
            answer = await asyncio.shield(self._registering)
            if answer.code != ResponseCode.SUCCESS:
                return before.refused(
                    f"the name server refused the registration: {answer.remark or answer.code}"
                )
            # Newer name servers reply SUCCESS also when they ignored the registration.
            listed = await self._listing()
            if (why := address_refusal(listed, self._slave)) is not None:
                # It registered after our first read of the listing.
                await self._unregister(listed)
                return before.refused(why)
            holder = listed.addresses.get(self._slave.broker_id)
        except (UnavailableError, CorruptionError) as error:
            self.claims = Claims()
            return before.failed(str(error))
        if holder != self._slave.advertise:
            return before.refused(
                f"the name server lists {holder or 'no broker'} as id {self._slave.broker_id} of broker"
                f" {self._slave.broker}, although this process registered as it"
            )
        return before.registered()

    async def _unregister(self, listed: Listing) -> None:
        command = self._registrar.withdrawal(listed)
        if command is not None:
            await self._call(command)

    async def _listing(self) -> Listing:
        answer = await self._call(RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO, 0))
        if answer.code != ResponseCode.SUCCESS:
            raise UnavailableError(
                f"name server {self._address} does not list its brokers: {answer.remark or answer.code}"
            )
        return parse_listing(answer.body, self._slave.broker)

    async def _call(self, command: RemotingCommand) -> RemotingCommand:
        return await self._link.call(command, ANSWER_S)

    def _lost(self, why: str, had_requests: bool) -> None:
        if self.progress.state is RegistrationState.REGISTERED:
            self._enter(self.progress.failed(why))
            self._awake.set()

    def _enter(self, progress: RegistrationProgress) -> None:
        """Note how the last attempt to register ended, and log it if it has ended differently from the one before."""
        before, self.progress = self.progress, progress
        self._registrar.note(progress)
        if (before.state, before.why) == (progress.state, progress.why):
            return
        level = logging.INFO if progress.state is RegistrationState.REGISTERED else logging.WARNING
        logger.log(
            level,
            "%s %s",
            self._registrar.what,
            progress.state.value,
            extra={"name_server": self._address, "id": self._slave.broker_id, "why": progress.why},
        )

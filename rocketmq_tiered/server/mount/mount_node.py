"""A node that serves its share of the retired brokers below one URL: acts on the decisions of membership.py.

Taking, giving and closing a broker are tasks of their own: none delays the renewal of the lease.
"""

import asyncio
import functools
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rocketmq_tiered.server.mount.mounted_archive import MountedArchive, MountPlace
from rocketmq_tiered.server.mount.node_lease import BrokerName, MountRecord, NodeState, withdraw_archive
from rocketmq_tiered.server.mount.sharing import SharingDecision
from tiered.errors import FencedError, TieredError, UnavailableError

logger = logging.getLogger(__name__)

TAKES_MAX = 16
"""Brokers that are opened at once: most of that time is replies of the object store."""
MOVED_S = 45.0
"""How long a released broker waits for its successor's registration."""
LINGER_S = 30.0
"""Reads are served this long after it: clients read routes that often."""
CHECK_EVERY = 6
"""Rounds between two counts of lag, and checks for expired brokers."""
RETRY_S = 1.0
AGAIN_S = 30.0
"""A broker that cannot be opened is tried again after this."""


class MountNode:
    """Belongs to one event loop."""

    def __init__(self, place: MountPlace) -> None:
        """``place``: what all brokers that this node serves have in common, such as the object store and settings."""
        self.place = place
        self.member = place.membership
        self.mounted: dict[BrokerName, MountedArchive] = {}
        self.failures: dict[BrokerName, str] = {}
        """Why brokers of this node's share are not served."""
        self._contested: set[BrokerName] = set()
        """Brokers whose groups another server had at the last try."""
        self._refused_s: dict[BrokerName, float] = {}
        """When they were refused last."""
        self.problem = ""
        """Why the lease was not renewed; empty if it was."""
        self.state = NodeState.ACTIVE
        self.mounted_count = 0
        """How often this node has mounted a broker so far."""
        self._busy: dict[BrokerName, asyncio.Task[None]] = {}
        """Tasks that take, give away or close a broker; one a broker at a time."""
        self._opening = asyncio.Semaphore(TAKES_MAX)
        self._wake = asyncio.Event()
        self._rounds = 0
        self._task: asyncio.Task[None] | None = None
        self._renewer = ThreadPoolExecutor(1)
        """Renews the lease in a thread of its own, so that it does not wait for threads that open brokers."""
        self._ports: set[int] = set()
        """Ports in use, by this process or by other programs."""

    def start(self) -> None:
        """Share the brokers from now on."""
        self._task = asyncio.create_task(self._run())

    def records(self) -> list[MountRecord]:
        """What this node serves, by name. Callable from any thread."""
        return [mounted.record() for _, mounted in sorted(self.mounted.items())]

    async def drain(self) -> None:
        """Give all brokers to other nodes, wait until their clients have moved there, and release this node's lease."""
        self.state = NodeState.DRAINING
        self._wake.set()
        while self.mounted or self._busy:
            self._wake.set()
            await asyncio.sleep(0.2)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.state = NodeState.LEFT
        try:
            await self._step()
        except (TieredError, KeyError) as error:
            logger.warning(
                "node %s of tiered mount could not release its lease, which runs out instead: %s",
                self.member.node,
                error,
            )
        self._renewer.shutdown(wait=False)

    # -- rounds -----------------------------------------------------------------------------------------------

    async def _step(self) -> SharingDecision:
        step = functools.partial(self.member.step, self.state, self.records())
        return await asyncio.get_running_loop().run_in_executor(self._renewer, step)

    async def _run(self) -> None:
        """Renew the lease and act on each decision, until it is cancelled; no error ends it, as a silent node loses
        its brokers."""
        while True:
            wait_s = RETRY_S
            try:
                decision = await self._step()
                self.problem = ""
                wait_s = self.member.wait_s()
            except FencedError as error:
                logger.error(
                    "this node closes all brokers that it served, and joins again, as it lost its lease: %s",
                    error,
                )
            except TieredError as error:
                if not self.problem:
                    logger.warning(
                        "the lease of node %s could not be renewed, and the next attempt follows: %s",
                        self.member.node,
                        error,
                    )
                self.problem = str(error)
            except Exception as error:
                # Unexpected: keep renewing the lease.
                logger.exception(
                    "the lease of node %s was not renewed because of an unexpected error, and the next attempt follows",
                    self.member.node,
                )
                self.problem = repr(error)
            else:
                self._act(decision)
            self._close_lost()
            self._rounds += 1
            if self._rounds % CHECK_EVERY == 1:
                self._check_each()
            if self._wake.is_set():  # brokers were taken or closed during this round: tell others soon
                wait_s = min(wait_s, RETRY_S)
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(RETRY_S / 10)

    def _act(self, decision: SharingDecision) -> None:
        """Start to take and give away the brokers of ``decision``. One that could not be opened within the last AGAIN_S
        is left to other nodes."""
        now_s = asyncio.get_running_loop().time()
        for name in decision.take:
            if self._refused_s.get(name, -AGAIN_S) + AGAIN_S > now_s:
                self.member.claiming.discard(name)
            elif name not in self.mounted:
                self._spawn(name, self._take(name))
        for name in decision.give:
            if name in self.mounted:
                self._spawn(name, self._give(self.mounted[name]))
        self._contested &= set(decision.take)
        self.failures = {name: why for name, why in self.failures.items() if name in decision.take}

    def _spawn(self, name: BrokerName, work: Coroutine[Any, Any, None]) -> None:
        if name in self._busy:
            work.close()
            return
        task = self._busy[name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._finished(name))

    def _finished(self, name: BrokerName) -> None:
        self._busy.pop(name, None)
        self._wake.set()

    async def _take(self, name: BrokerName) -> None:
        """Open one broker of this node's share and serve it, unless the node is leaving. No more than TAKES_MAX are
        opened at once."""
        async with self._opening:
            if self.state is not NodeState.ACTIVE:
                self.member.claiming.discard(name)
                return
            port = self._free_port()
            try:
                mounted = await MountedArchive.take(self.place, name, port)
            except (TieredError, OSError) as error:
                if not isinstance(error, OSError):  # a port that another program has stays among those in use
                    self._ports.discard(port)
                self._note_refusal(name, error)
                return
            self.failures.pop(name, None)
            self._contested.discard(name)
            self.mounted[name] = mounted
            self.member.claiming.discard(name)
            self.mounted_count += 1
            logger.info("broker mounted", extra={"broker": name.broker, "address": mounted.address})

    def _note_refusal(self, name: BrokerName, error: Exception) -> None:
        """Note why a broker could not be mounted, and log each reason once. Other nodes may try it now, unless it is
        unknown whether this node has claimed the broker's groups."""
        if not isinstance(error, UnavailableError):
            self.member.claiming.discard(name)
        if isinstance(error, FencedError) and name not in self._contested:
            self._contested.add(name)  # another node was faster; its next lease says so
            return
        if not isinstance(error, FencedError | UnavailableError):
            self._refused_s[name] = asyncio.get_running_loop().time()
        if self.failures.get(name) != str(error):
            logger.warning("broker %s is not mounted: %s", name.broker, error, extra={"broker": name.broker})
        self.failures[name] = str(error)

    def _free_port(self) -> int:
        """Return a port for the next broker, from ``mount.first_port`` on, or 0 for any port if that is not set. If all
        seem to be in use the first is returned: to listen there then fails with an error that says so."""
        mount = self.place.settings.mount
        if mount.first_port == 0:
            return 0
        ports = range(mount.first_port, mount.first_port + mount.ports)
        port = next((port for port in ports if port not in self._ports), None)
        if port is None:  # those that other programs had may be free again
            self._ports = {mounted.port for mounted in self.mounted.values()}
            port = next((port for port in ports if port not in self._ports), mount.first_port)
        self._ports.add(port)
        return port

    async def _give(self, mounted: MountedArchive) -> None:
        """Give a broker away: release its groups, serve reads until its clients have moved to the node that takes it,
        and close it."""
        await mounted.release()
        logger.info("broker released", extra={"broker": mounted.name.broker})
        self._wake.set()
        others = [
            lease
            for node, lease in self.member.leases.items()
            if node != self.member.node and lease.is_living
        ]
        # Without another node, clients of a broker that is still to be mounted have nowhere to move.
        if (others or mounted.name not in self.member.announced) and await mounted.await_move(MOVED_S):
            await asyncio.sleep(LINGER_S)
        await self._close(mounted)

    def _close_lost(self) -> None:
        for mounted in list(self.mounted.values()):
            if mounted.is_lost:
                self._spawn(mounted.name, self._close(mounted))

    async def _close(self, mounted: MountedArchive) -> None:
        mounted.is_leaving = True
        self.mounted.pop(mounted.name, None)
        await mounted.close()
        self._ports.discard(mounted.port)
        if mounted.owns_groups:  # the store did not answer: no other node can claim them
            self.member.claiming.add(mounted.name)

    def _check_each(self) -> None:
        """Count the lag of each broker; give it away if its archive has a writer again, and end it if all its messages
        have expired."""
        for mounted in list(self.mounted.values()):
            mounted.note_lag()
            if mounted.is_leaving or mounted.name in self._busy:
                continue
            if not mounted.is_retired:
                self._spawn(mounted.name, self._give(mounted))
            elif mounted.is_empty():
                self._spawn(mounted.name, self._end(mounted))

    async def _end(self, mounted: MountedArchive) -> None:
        """Stop serving a broker whose messages have all expired, and take it out of the name servers' routes."""
        logger.info(
            "broker %s is no longer mounted, as all its messages have expired",
            mounted.name.broker,
            extra={"broker": mounted.name.broker},
        )
        # Withdrawn first, as another node would take it.
        await asyncio.to_thread(withdraw_archive, self.place.store, mounted.name)
        await mounted.release()
        assert mounted.registrar is not None
        mounted.registrar.has_ended = True
        await self._close(mounted)

"""Base of the archive, proxy and slave services: one port, its clients' group membership, periodic expiry, close."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.listen.options import MemoryShares, is_loopback
from rocketmq_tiered.server.wire.connection import Connection
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import Authorizer, HandlerTable
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.settings.sections import ServeSettings

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 5.0


class Service:
    """Serves one port on the running event loop, until ``close``."""

    def __init__(self, settings: ServeSettings, table: HandlerTable, clock: Clock = MACHINE_CLOCK) -> None:
        """``table``: the handlers of requests, to which subclasses add theirs."""
        self._settings, self.table, self._clock = settings, table, clock
        self._memory = MemoryShares(settings.memory_bytes)
        self.clients = ClientTable(clock, bytes_max=self._memory.clients)
        """Group members and their subscriptions, from heartbeats."""
        self._expiring: list[Callable[[], None]] = [self.clients.expire]
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.has_plain_accounts = False
        """Whether clients on other hosts sign requests on connections without TLS."""

    async def _listen(self, options: ServerOptions) -> tuple[str, int]:
        """Accept connections as ``options`` say, and return host and port that were bound. Warns if clients on other
        hosts would sign requests on connections without TLS. Raises OSError when the port is taken."""
        self._listener = Listener(self.table, options, on_close=self._connection_closed)
        bound = await self._listener.start()
        if self._settings.acl_file and not self._settings.tls_certificate and not is_loopback(bound[0]):
            self.has_plain_accounts = True
            logger.warning(
                "clients sign their requests on connections without TLS, so that others can read and repeat them: set"
                " serve.tls_certificate",
                extra={"bound": bound[0]},
            )
        self._spawn(self._expire())
        return bound

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    def _connection_closed(self, connection: Connection) -> None:
        self.clients.closed(connection)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            for expire in self._expiring:
                expire()

    async def close(self, drain_s: float = 5.0) -> None:
        """Stop accepting, let requests in progress finish for ``drain_s``, close connections, end background tasks."""
        if self._listener is not None:
            await self._listener.close(drain_s)
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _authorizer(self) -> Authorizer:
        assert self._listener is not None and self._listener.authorizer is not None
        return self._listener.authorizer

    @property
    def audited(self) -> Mapping[str, int]:
        authorizer = None if self._listener is None else self._listener.authorizer
        return {} if authorizer is None else authorizer.audited

    @property
    def refused_proxy_headers(self) -> int:
        return 0 if self._listener is None else self._listener.refused_proxy_headers

    @property
    def _connection_count(self) -> int:
        return 0 if self._listener is None else len(self._listener.connections)

    def _group_sizes(self) -> list[tuple[str, int]]:
        """(group, members), by name."""
        return sorted((group.name, len(group.members)) for group in self.clients.groups())

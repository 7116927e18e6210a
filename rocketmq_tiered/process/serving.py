"""Serving in `tiered run`: proxy and slave mode on one thread, over one archive opened for reading.

Ports listen from the start; handlers over the archive follow once the uploader has created it. Both modes share the
archive access: its caches, request scheduler and byte budget are the process's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

from fetcher.access import ArchiveAccess, open_async_access
from fetcher.policy.broker_files import REFRESH_S as COMPACTION_REFRESH_S
from fetcher.policy.broker_files import BrokerFiles, CompactionTopics
from fetcher.policy.read_policy import ReadPolicies
from fetcher.policy.read_router import ReadRouter
from rocketmq_tiered.process.broker_side import (
    address_of,
    checks_clients,
    credentials_of,
    missing_rules,
    name_servers_of,
    open_store_of,
    read_conf,
    tls_of,
    topic_filter_of,
)
from rocketmq_tiered.server.backend.pull_handlers import PullLimits
from rocketmq_tiered.server.backend.served_archive import ServedArchive
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.listen.options import check_advertised, is_loopback, parse_address
from rocketmq_tiered.server.proxy.broker_view import BrokerViews
from rocketmq_tiered.server.proxy.group_resets import GroupResets
from rocketmq_tiered.server.proxy.merged_lookups import MergedLookups, MergedOffsets
from rocketmq_tiered.server.proxy.proxy_handlers import ProxyHandlers
from rocketmq_tiered.server.proxy.proxy_pull import ProxyPulls, PullContext
from rocketmq_tiered.server.proxy.proxy_service import ProxyConfig, ProxyService
from rocketmq_tiered.server.proxy.relay_service import RelayService
from rocketmq_tiered.server.proxy.timer_gateway import GatewayConfig
from rocketmq_tiered.server.slave.pull_redirect import RedirectContext, SlavePulls
from rocketmq_tiered.server.slave.registration import SlaveConfig
from rocketmq_tiered.server.slave.slave_service import SlaveOptions, SlaveService
from tiered.archive.private_key import private_key
from tiered.broker_store.conf import BrokerConf, BrokerNames
from tiered.broker_store.store import BrokerStore
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError, TieredError, UnavailableError, UsageError
from tiered.model.queue import TopicFilter
from tiered.settings.load import FIELDS, changed_keys
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)


def proxy_config(settings: Settings, conf: BrokerConf | None, broker: str) -> ProxyConfig:
    """Addresses of proxy mode. Raises UsageError for a missing or impossible one."""
    address, name_servers = _upstream_addresses(settings, conf, "serve")
    timers, serve = settings.timers, settings.serve
    gateway = GatewayConfig(timers.topic, timers.max_delay_ms, timers.ahead_ms, credentials_of(settings))
    return ProxyConfig(
        broker,
        address,
        name_servers,
        serve.advertise,
        tls_of(settings),
        checks_clients(conf),
        gateway if timers.topic else None,
    )


def slave_config(settings: Settings, conf: BrokerConf | None, broker: str) -> SlaveConfig:
    """Addresses of slave mode. Raises UsageError for a missing or impossible one."""
    slave = settings.slave
    address, name_servers = _upstream_addresses(settings, conf, "slave")
    if slave.advertise == settings.serve.advertise:
        raise UsageError(
            f"slave.advertise = {slave.advertise} is the same as serve.advertise",
            hint="set a different port for each",
        )
    host, port = parse_address(slave.advertise, "slave.advertise")
    if port == 0:
        raise UsageError("slave.advertise has port 0", hint="set the port that clients dial")
    others = [parse_address(other, "")[0] for other in (address, *name_servers)]
    if is_loopback(host) and not all(map(is_loopback, others)):
        raise UsageError(
            f"slave.advertise = {slave.advertise} is a loopback address: clients on other hosts cannot reach it",
            hint="set slave.advertise to an address of this host that clients reach",
        )
    bind = slave.bind
    if is_loopback(parse_address(bind, "slave.bind")[0]) and not is_loopback(host):
        # Consumers that the master redirects to an unreachable port wait forever.
        raise UsageError(
            f"slave.bind = {bind} is a loopback address: clients cannot reach slave.advertise = {slave.advertise}",
            hint="bind to an address of the host, such as 0.0.0.0:10931",
        )
    return SlaveConfig(broker, address, name_servers, slave.advertise, slave.broker_id, tls_of(settings))


def _upstream_addresses(
    settings: Settings, conf: BrokerConf | None, section: str
) -> tuple[str, tuple[str, ...]]:
    """The broker's address and its name servers. ``section``: of the settings that enable the mode."""
    key, advertise = f"{section}.advertise", getattr(settings, section).advertise
    check_advertised(advertise, section)
    address = address_of(settings, conf)
    if not address:
        raise UsageError(
            f"{key} requires the broker's address", hint="set broker.address, or brokerIP1 in broker.conf"
        )
    name_servers = name_servers_of(settings, conf)
    if not name_servers:
        raise UsageError(
            f"{key} requires name servers", hint="set broker.name_servers, or namesrvAddr in broker.conf"
        )
    for server in name_servers:
        parse_address(server, "broker.name_servers")
    if advertise in (address, *name_servers):
        raise UsageError(
            f"{key} = {advertise} is the address of the broker or of a name server",
            hint="set it to an address of this process",
        )
    return address, name_servers


def services_of(settings: Settings, conf: BrokerConf | None, names: BrokerNames) -> list[RelayService[Any]]:
    """The services that the settings enable, not started. Raises UsageError for impossible addresses, and without the
    rules of a broker with access control."""
    services: list[RelayService[Any]] = []
    if (problem := missing_rules(settings, conf)) is not None:
        raise problem
    if settings.serve.advertise:
        services.append(
            ProxyService(
                proxy_config(settings, conf, names.broker), settings.serve, ReadPolicies.of(settings)
            )
        )
    if settings.slave.advertise:
        options = SlaveOptions(
            slave_config(settings, conf, names.broker),
            names.cluster,
            replace(settings.serve, bind=settings.slave.bind),
            broker_conf=conf.properties if conf is not None else None,
            credentials=credentials_of(settings),
            checks_clients=checks_clients(conf),
        )
        services.append(SlaveService(options))
    if services and settings.broker.tls and not settings.serve.tls_certificate:
        logger.warning(
            "clients connect without TLS although the broker uses it: serve.tls_certificate is not set"
        )
    return services


def needs_account(settings: Settings) -> bool:
    """Whether clients need an account of server or broker, by the settings and the broker.conf of now; assumed if that
    cannot be read."""
    if settings.serve.acl_file or settings.broker.credentials_file:
        return True
    try:
        conf = read_conf(settings)
    except TieredError:
        return True
    return conf is not None and checks_clients(conf)


START_S = 30.0
OPEN_RETRY_S, OPEN_RETRY_MAX_S = 1.0, 10.0
REFRESH_S = 10.0
"""How often the catalog is refreshed if no writer runs in this process; pulls refresh it themselves."""
FIXED_AT_START = ("read", "serve", "broker.address", "broker.conf_path")
"""Sections and keys that serving reads at the start only, except for live settings."""
FIXED_AT_OPEN = ("object_store", "fetch")
"""Sections that serving reads when it opens the archive."""


class MergedHandlers:
    """Handlers over archive and broker; those of slave mode with ``redirect``. Belongs to one event loop."""

    def __init__(
        self,
        archive: ServedArchive,
        access: ArchiveAccess,
        settings: Settings,
        clients: ClientTable,
        store: BrokerStore,
        compacted: CompactionTopics,
        *,
        conf: BrokerConf | None,
        redirect: RedirectContext | None,
        key: bytes,
    ) -> None:
        """``redirect``: None in proxy mode; ``key``: the archive's private key, for recall handles; ``store``: the
        broker's files."""
        self.key = key
        read, serve = settings.read, settings.serve
        self._archive, self._access, self._store = archive, access, store
        self._is_slave = redirect is not None
        self._threads = ThreadPoolExecutor(read.local_threads, thread_name_prefix="broker-files")
        policies, topics = self._policies(settings), self._topics(settings)
        self.router = router = ReadRouter(access.catalog, policies, topics, compacted)
        views = BrokerViews(BrokerFiles(store, refresh_s=read.local_refresh_ms / 1000), self._threads)
        context = PullContext(archive, views, clients)
        limits = PullLimits(count_max=serve.pull_messages_max, bytes_max=serve.pull_bytes_max)
        offsets = MergedOffsets(router, archive, views)
        pulls = ProxyPulls(router, context, limits).handlers()
        if redirect is not None:
            pulls = SlavePulls(pulls, router, views, redirect).handlers()
        self.handlers: ProxyHandlers = {
            **pulls,
            **offsets.handlers(),
            **GroupResets(router, offsets, clients, checks_clients=checks_clients(conf)).handlers(),
            **MergedLookups(router, archive).handlers(),
        }
        self._watching = [
            asyncio.create_task(archive.watch(REFRESH_S)),
            asyncio.create_task(_watch(compacted)),
        ]

    @classmethod
    async def opened(
        cls,
        access: ArchiveAccess,
        clients: ClientTable,
        settings: Settings,
        conf: BrokerConf | None,
        redirect: RedirectContext | None = None,
    ) -> MergedHandlers:
        """Over the archive and the broker's files. Raises what opening the store and reading the archive raise."""
        archive = ServedArchive(access)
        await archive.load()
        key = b"" if redirect is not None else await asyncio.to_thread(private_key, access.store)
        store = await asyncio.to_thread(open_store_of, settings, conf)
        compacted = CompactionTopics(store)
        try:
            await asyncio.to_thread(compacted.refresh)
        except BaseException:
            store.close()
            raise
        return cls(
            archive, access, settings, clients, store, compacted, conf=conf, redirect=redirect, key=key
        )

    def committed(self) -> None:
        """The catalog has a new version: wake waiting pulls."""
        self._archive.wake()

    def apply(self, settings: Settings) -> None:
        """Use other read policies and topic filters, from the next request on."""
        self.router.apply(self._policies(settings), self._topics(settings))

    def _policies(self, settings: Settings) -> ReadPolicies:
        policies = ReadPolicies.of(settings)
        return policies.for_slave() if self._is_slave else policies

    def _topics(self, settings: Settings) -> TopicFilter:
        access = self._access
        return topic_filter_of(settings, self._store.conf, access.cluster, access.broker)

    def close(self) -> None:
        for watching in self._watching:
            watching.cancel()
        self._threads.shutdown()
        self._store.close()


async def _watch(compacted: CompactionTopics) -> None:
    """Keep the set of compaction topics up to date; log a failure once, until it is another or none."""
    logged = ""
    while True:
        await asyncio.sleep(COMPACTION_REFRESH_S)
        try:
            await asyncio.to_thread(compacted.refresh)
            logged = ""
        except TieredError as error:
            if str(error) != logged:
                logger.warning(
                    "new compaction topics are not recognized until the broker's topic table can be read: %s",
                    error,
                )
            logged = str(error)


OpenHandlers = Callable[[ArchiveAccess, RelayService[Any], Settings], Awaitable[MergedHandlers]]


def handlers_with(conf: BrokerConf | None) -> OpenHandlers:
    """Return the function that opens a service's handlers once its archive can be read. ``conf``: the configuration
    of the broker on this host, if it has one. Only a slave redirects its consumers to the master."""

    async def opened(access: ArchiveAccess, service: RelayService[Any], settings: Settings) -> MergedHandlers:
        redirect = service.redirect if isinstance(service, SlaveService) else None
        return await MergedHandlers.opened(access, service.clients, settings, conf, redirect)

    return opened


# -- the thread -----------------------------------------------------------------------------------------------


class ServingThread:
    """Serves from ``start`` to ``close``. Methods are callable from any thread."""

    def __init__(
        self,
        names: BrokerNames,
        settings: Settings,
        services: Sequence[RelayService[Any]],
        open_handlers: OpenHandlers,
    ) -> None:
        """``open_handlers`` makes the handlers of a service once there is an archive to read."""
        self._names, self._settings = names, settings
        self._services, self._open_handlers = services, open_handlers
        self._started_with = settings
        self._started: Future[list[tuple[str, int]]] = Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._access: ArchiveAccess | None = None
        self._opened_with: Settings | None = None
        self._handlers: list[MergedHandlers] = []
        self._newest: CatalogState | None = None
        self._drain_s = 0.0

    def start(self) -> list[tuple[str, int]]:
        """Listen; returns the bound addresses, one per service. Raises UsageError if a port is not available."""
        self._thread.start()
        return self._started.result(START_S)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def access(self) -> ArchiveAccess | None:
        """The archive that clients are served from; None until it is open."""
        return self._access

    def adopt(self, state: CatalogState) -> None:
        """The uploader has committed ``state``."""
        self._newest = state
        if self._access is not None:
            self._access.catalog.adopt(state)
        for handlers in self._handlers:
            self._on_loop(handlers.committed)

    def apply(self, settings: Settings) -> None:
        """Use the read policies and topic filters of ``settings``; log the settings that need a restart here."""
        self._on_loop(lambda: self._apply(settings))

    def _apply(self, settings: Settings) -> None:
        """Apply what can change while clients are served, and log the settings that need a restart."""
        self._settings = settings
        fixed = _fixed_keys(self._started_with, settings, FIXED_AT_START)
        if self._opened_with is not None:
            fixed += _fixed_keys(self._opened_with, settings, FIXED_AT_OPEN)
        if fixed:
            logger.warning("restart needed to apply these settings to serving", extra={"keys": fixed})
        for service in self._services:
            service.apply(ReadPolicies.of(settings))
        for handlers in self._handlers:
            handlers.apply(settings)

    def close(self, drain_s: float = 5.0) -> None:
        """Let requests in progress finish for ``drain_s``, close connections and the archive."""
        self._drain_s = drain_s
        if self._stop is not None:
            self._on_loop(self._stop.set)
        self._thread.join(drain_s + START_S)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call)

    def _run(self) -> None:
        """The thread: an error before the ports listen is raised by ``start``, a later one is logged."""
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            logger.critical(
                "clients are no longer served, because of an error: restart tiered run", exc_info=error
            )

    async def _main(self) -> None:
        """Listen, open the archive as soon as there is one, and close everything at the stop."""
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            self._started.set_result([await _start(service) for service in self._services])
        except BaseException:
            await self._close()
            raise
        async with AsyncExitStack() as opened:
            opening = asyncio.create_task(self._open(opened))
            await self._stop.wait()
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await self._close()

    async def _close(self) -> None:
        await asyncio.gather(*(service.close(self._drain_s) for service in self._services))

    async def _open(self, opened: AsyncExitStack) -> None:
        """Open the archive, with retries."""
        wait_s, logged = OPEN_RETRY_S, ""
        while True:
            try:
                await self._open_once(opened)
                return
            except NotFoundError:
                wait_s = OPEN_RETRY_S  # the uploader's first commit creates it
            except TieredError as error:
                level = logging.WARNING if isinstance(error, UnavailableError) else logging.ERROR
                if str(error) != logged:
                    logger.log(level, "archive not opened for clients yet: %s", error)
                logged = str(error)
                wait_s = min(OPEN_RETRY_MAX_S, wait_s * 2)
            await asyncio.sleep(wait_s)

    async def _open_once(self, opened: AsyncExitStack) -> None:
        """Open the archive for all services, or for none: on an error everything is closed again."""
        settings, names = self._settings, self._names
        access = await asyncio.to_thread(
            lambda: open_async_access(
                settings.archive.url, cluster=names.cluster, broker=names.broker, settings=settings
            )
        )
        made: list[MergedHandlers] = []
        try:
            for service in self._services:
                made.append(await self._open_handlers(access, service, self._started_with))
        except BaseException:
            for handlers in made:
                handlers.close()
            await asyncio.to_thread(access.close)
            raise
        opened.push_async_callback(asyncio.to_thread, access.close)
        for handlers in made:
            opened.callback(handlers.close)
        self._access, self._opened_with = access, settings
        if self._newest is not None:
            access.catalog.adopt(self._newest)
        for service, handlers in zip(self._services, made, strict=True):
            handlers.apply(self._settings)
            service.open_archive(handlers.handlers, handlers.key)
        self._handlers = made
        logger.info(
            "archive open for clients", extra={"archive": access.title, "version": access.state.version}
        )


def _fixed_keys(before: Settings, after: Settings, places: Collection[str]) -> list[str]:
    """Changed keys of ``places`` that the uploader applies and serving does not; settings that need a restart of the
    process are logged elsewhere."""
    rules = ((key, FIELDS[key]) for key in changed_keys(before, after))
    return [
        key
        for key, item in rules
        if (item.section in places or key in places) and not (item.rule.live or item.rule.restart)
    ]


async def _start(service: RelayService[Any]) -> tuple[str, int]:
    try:
        return await service.start()
    except OSError as error:
        raise UsageError(
            f"cannot listen on {service.bind}: {error.strerror or error}", hint=f"set {service.section}.bind"
        ) from error

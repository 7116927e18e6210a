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
    """What proxy mode has to know: the addresses of broker, name servers and this process, TLS and accounts for the
    broker, and the topic for timers, if there is one. Raises UsageError for a missing or impossible address."""
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
    """What slave mode has to know: the addresses of master, name servers and this process, its broker id, and TLS.
    Raises UsageError for an address that is missing or that clients could not reach."""
    slave = settings.slave
    address, name_servers = _upstream_addresses(settings, conf, "slave")
    if slave.advertise == settings.serve.advertise:
        raise UsageError(
            f"slave.advertise = {slave.advertise} is the same as serve.advertise",
            hint="set another port in one of the two",
        )
    host, port = parse_address(slave.advertise, "slave.advertise")
    if port == 0:
        raise UsageError(
            f"slave.advertise = {slave.advertise} has port 0", hint="set the port that clients dial"
        )
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
            hint="set slave.bind to an address of this host that clients reach, such as 0.0.0.0:10931",
        )
    return SlaveConfig(broker, address, name_servers, slave.advertise, slave.broker_id, tls_of(settings))


def _upstream_addresses(
    settings: Settings, conf: BrokerConf | None, section: str
) -> tuple[str, tuple[str, ...]]:
    """The addresses of the broker and of its name servers, checked. ``section``: "serve" for proxy mode, "slave" for
    slave mode. Raises UsageError for a missing address, and for an advertised one that is not this process's."""
    key, advertise = f"{section}.advertise", getattr(settings, section).advertise
    check_advertised(advertise, section)
    address = address_of(settings, conf)
    if not address:
        raise UsageError(
            f"{key} is set, but the broker's address is not known",
            hint="set broker.address, or brokerIP1 in broker.conf",
        )
    name_servers = name_servers_of(settings, conf)
    if not name_servers:
        raise UsageError(
            f"{key} is set, but the broker's name servers are not known",
            hint="set broker.name_servers, or namesrvAddr in broker.conf",
        )
    for server in name_servers:
        parse_address(server, "broker.name_servers")
    if advertise in (address, *name_servers):
        raise UsageError(
            f"{key} = {advertise} is the address of the broker or of a name server",
            hint=f"set {key} to an address of this process",
        )
    return address, name_servers


def services_of(settings: Settings, conf: BrokerConf | None, names: BrokerNames) -> list[RelayService[Any]]:
    """The services for clients that the settings enable, proxy and slave mode, not started. Raises UsageError for
    impossible addresses, and if the broker has access control but this process does not have its rules."""
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
            "clients connect to this process without TLS although the broker uses it: set serve.tls_certificate"
        )
    return services


def needs_account(settings: Settings) -> bool:
    """Whether clients need an account of this server or of the broker, by the settings and the broker.conf of this
    moment. If broker.conf cannot be read, they are assumed to."""
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
    """Handlers of client requests that answer from the archive and the broker's files together, for proxy mode or, with
    ``redirect``, for slave mode. Belongs to one event loop."""

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
        """``redirect``: how slave mode sends consumers back to the master, None in proxy mode; ``key``: the archive's
        private key, which signs recall handles of timers; ``store``: the broker's files, which this object closes;
        ``compacted``: the topics whose keys the broker compacts."""
        self.key = key
        read, serve = settings.read, settings.serve
        self._archive, self._access, self._store = archive, access, store
        self._is_slave = redirect is not None
        self._threads = ThreadPoolExecutor(read.local_threads, thread_name_prefix="broker-files")
        policies, topics = self._policies(settings), self._topics(settings)
        # The router decides for each request whether the archive or the broker answers.
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
        """Handlers over the archive of ``access`` and the store of the broker on this host, which it opens in a thread.
        Raises what opening the store and reading the archive raise."""
        archive = ServedArchive(access)
        await archive.load()
        # Slave mode takes no timers, so it needs no key for their recall handles.
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
    """Read the set of topics whose keys the broker compacts again and again, until cancelled. A failure is logged when
    it begins and when its cause changes; the set stays as it was."""
    logged = ""
    while True:
        await asyncio.sleep(COMPACTION_REFRESH_S)
        try:
            await asyncio.to_thread(compacted.refresh)
            logged = ""
        except TieredError as error:
            if str(error) != logged:
                logger.warning(
                    "the broker's topic table cannot be read, so that new topics with cleanup.policy=COMPACTION are "
                    "served like others: %s",
                    error,
                )
            logged = str(error)


OpenHandlers = Callable[[ArchiveAccess, RelayService[Any], Settings], Awaitable[MergedHandlers]]


async def open_handlers(
    conf: BrokerConf | None, access: ArchiveAccess, service: RelayService[Any], settings: Settings
) -> MergedHandlers:
    """The handlers of ``service`` over the archive of ``access``. ``conf``: the configuration of the broker on this
    host, if it has one. Only a slave redirects its consumers to the master."""
    redirect = service.redirect if isinstance(service, SlaveService) else None
    return await MergedHandlers.opened(access, service.clients, settings, conf, redirect)


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
        """``services``: proxy mode, slave mode or both, for the broker of ``names``; ``open_handlers`` makes the
        request handlers of a service once there is an archive to read."""
        self._names, self._settings = names, settings
        self._services, self._open_handlers = services, open_handlers
        self._started_with = settings
        self._started: Future[list[tuple[str, int]]] = Future()
        """The bound addresses, or why the ports cannot listen."""
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._access: ArchiveAccess | None = None
        self._opened_with: Settings | None = None
        """The settings when the archive was opened; None before."""
        self._handlers: list[MergedHandlers] = []
        self._newest: CatalogState | None = None
        """The last state that the uploader of this process has committed."""
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
        """Called by the uploader when it has committed ``state``: clients are served from that state, and pulls that
        wait for messages look again."""
        self._newest = state
        if self._access is not None:
            self._access.catalog.adopt(state)
        for handlers in self._handlers:
            self._on_loop(handlers.committed)

    def apply(self, settings: Settings) -> None:
        """Use the read policies and topic filters of ``settings``; log the settings that need a restart here."""
        self._on_loop(lambda: self._apply(settings))

    def _apply(self, settings: Settings) -> None:
        """Apply, on the event loop, the settings that can change while clients are served, and log those that are in
        effect for clients only after a restart of the process."""
        self._settings = settings
        fixed = _fixed_keys(self._started_with, settings, FIXED_AT_START)
        if self._opened_with is not None:
            fixed += _fixed_keys(self._opened_with, settings, FIXED_AT_OPEN)
        if fixed:
            logger.warning(
                "for clients, these changed settings take effect when tiered run is restarted: %s",
                ", ".join(fixed),
            )
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
        """Run the event loop in the thread until ``close``. An error before the ports listen is raised by ``start``; a
        later one is logged, as no caller waits for it."""
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
                return
            logger.critical(
                "proxy and slave mode have ended with an error, so that their clients are not served: restart tiered "
                "run",
                exc_info=error,
            )

    async def _main(self) -> None:
        """The main task of the event loop: listen, open the archive as soon as there is one, wait for ``close``, and
        close everything."""
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
        """Open the archive for clients, and try again after each failure, at growing intervals, until it is open. A
        failure is logged when it begins and when its cause changes. ``opened`` closes the archive at the end."""
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
                    logger.log(
                        level, "the archive cannot be opened for clients, which is tried again: %s", error
                    )
                logged = str(error)
                wait_s = min(OPEN_RETRY_MAX_S, wait_s * 2)
            await asyncio.sleep(wait_s)

    async def _open_once(self, opened: AsyncExitStack) -> None:
        """Open the archive for clients of all services, or of none: on an error everything is closed again. ``opened``
        closes what stays open. Raises NotFoundError while there is no archive."""
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
            "the archive is open for clients",
            extra={"archive": access.title, "version": access.state.version},
        )


def _fixed_keys(before: Settings, after: Settings, sections: Collection[str]) -> list[str]:
    """The keys of ``sections``, which may be single keys as well, that changed and that a restart of the uploader
    applies while proxy and slave mode keep the old values. Keys that need a new process for the uploader too
    are not among them: lifecycle.py logs them."""
    fields = ((key, FIELDS[key]) for key in changed_keys(before, after))
    return [
        key
        for key, field in fields
        if (field.section in sections or key in sections) and not (field.rule.live or field.rule.restart)
    ]


async def _start(service: RelayService[Any]) -> tuple[str, int]:
    try:
        return await service.start()
    except OSError as error:
        raise UsageError(
            f"cannot listen on {service.bind}: {error.strerror or error}", hint=f"set {service.section}.bind"
        ) from error

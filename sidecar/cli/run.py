"""`tiered run`: follow a broker and archive its messages until stopped."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest

from fetcher.access import ArchiveAccess
from server.proxy.proxy_service import ProxyService
from server.slave.slave_service import SlaveService
from sidecar.admin import AdminServer
from sidecar.allocator import return_freed_memory
from sidecar.broker_side import TlsCache, names_of, open_store_of, read_conf
from sidecar.cli.arguments import (
    BROKER_FLAGS,
    NAME_FLAGS,
    STORE_FLAGS,
    TOPIC_FLAGS,
    add_places,
    add_setting_flags,
    add_writer_flags,
    settings_of,
)
from sidecar.instance import InstanceDescription, StateDirectory, default_state_dir
from sidecar.lifecycle import EXIT_NOT_DRAINED, Service
from sidecar.logs import log_json
from sidecar.metrics import ObjectStoreCollector, StatusCollector
from sidecar.proxy_answers import MergedAnswers
from sidecar.proxy_metrics import ProxyCollector, serving_report
from sidecar.proxy_place import proxy_config
from sidecar.proxy_thread import ProxyOrder, proxy_port
from sidecar.report import StatusReport, encode_report
from sidecar.serving_thread import Port, ServingThread
from sidecar.slave_metrics import SlaveCollector, slave_report
from sidecar.slave_port import slave_port
from sidecar.uploader_job import ProcessPins, UploaderJob, Writer
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.names import BrokerNames
from tiered.catalog.state import CatalogState
from tiered.errors import StoreFullError, UnavailableError, UsageError
from tiered.object_store.open_store import check_addresses
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings that are usually given by hand."""
    add_places(parser)
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS, BROKER_FLAGS, TOPIC_FLAGS)
    add_writer_flags(parser)


def execute(options: argparse.Namespace) -> int:
    """Serve until a signal, or until something that retrying cannot cure."""
    return_freed_memory()
    loaded = settings_of(options)
    settings = loaded.settings
    log_json(settings.process.log_level)
    if not settings.archive.url:
        raise UsageError("which archive? archive.url is not set", hint="give --url file:///… or s3://…")
    check_addresses(settings.archive.url, settings.object_store.endpoint_url)  # before the log has them
    conf = read_conf(settings)
    names, store_path = _names(settings, conf)
    directory = settings.process.state_dir or default_state_dir(os.environ, names.cluster, names.broker)
    with StateDirectory(Path(directory)) as state:
        metrics = StoreMetrics()
        served = _Served.of(settings, conf, names)
        thread = served.thread
        factory = _Factory(state, metrics, thread.adopt if thread is not None else None)
        on_reload = thread.apply if thread is not None else _nothing
        service = Service(loaded, factory=factory, reload=lambda: settings_of(options), on_reload=on_reload)
        service.handle_signals()
        admin = AdminServer(settings.admin.host, settings.admin.port, _Source(service, metrics, served))
        started_ms = time.time_ns() // 1_000_000
        description = InstanceDescription(
            os.getpid(),
            admin.url,
            settings.archive.url,
            names.cluster,
            names.broker,
            store_path,
            started_ms,
        )
        try:
            state.describe(description)
        except StoreFullError as error:
            # Other commands do not find this one; archiving does not wait for that.
            logger.warning("not described: %s", error)
        logger.info(
            "started", extra={"admin": admin.url, "archive": settings.archive.url, "store": store_path}
        )
        if thread is not None:
            bound = [f"{host}:{port}" for host, port in thread.start()]
            advertised = [text for text in (settings.serve.advertise, settings.slave.advertise) if text]
            logger.info("serving clients", extra={"bound": bound, "advertised": advertised})
        code = service.serve()
        if thread is not None:
            thread.close()
        admin.close()
    logger.info("ended", extra={"exit_code": code})
    if code == EXIT_NOT_DRAINED:
        # Threads still wait for the object store; the interpreter would wait for them. Nothing is lost:
        # what is not committed is in the commitlog.
        sys.stderr.flush()
        os._exit(code)
    service.close()
    factory.close()
    return code


def _names(settings: Settings, conf: BrokerConf | None) -> tuple[BrokerNames, str]:
    with open_store_of(settings, conf) as store:
        return names_of(settings, store), str(store.path)


@dataclass(frozen=True)
class _Served:
    """What clients are served; not started yet. ``thread`` is None where nobody said what clients dial."""

    proxy: ProxyService | None = None
    slave: SlaveService | None = None
    thread: ServingThread | None = None

    @classmethod
    def of(cls, settings: Settings, conf: BrokerConf | None, names: BrokerNames) -> _Served:
        """By the settings. Raises UsageError for impossible places."""
        proxy, slave = None, None
        ports: list[Port] = []
        if settings.serve.advertise:

            async def answers(access: ArchiveAccess, service: ProxyService) -> MergedAnswers:
                return await MergedAnswers.opened(access, service.clients, settings, conf)

            order = ProxyOrder(proxy_config(settings, conf, names.broker), answers)
            proxy, port = proxy_port(order, settings)
            ports.append(port)
        if settings.slave.advertise:
            slave, port = slave_port(settings, conf, names)
            ports.append(port)
        if ports and settings.broker.tls and not settings.serve.tls_certificate:
            logger.warning(
                "clients are served without TLS, though the broker is dialled with it: serve.tls_certificate is not set"
            )
        return cls(proxy, slave, ServingThread(names, settings, ports) if ports else None)


def _nothing(settings: Settings) -> None:
    """Nobody has settings to apply."""


class _Factory:
    """Builds jobs. A take-over is asked for once for each (re)load of the settings, until it is answered: fenced
    again means fenced, a store that was away does not."""

    def __init__(
        self, state: StateDirectory, metrics: StoreMetrics, committed: Callable[[CatalogState], None] | None
    ) -> None:
        self._state = state
        self._metrics = metrics
        self._committed = committed
        self._took_over_for: Settings | None = None
        self._asking: tuple[UploaderJob, Settings] | None = None
        self._pins, self._tls = ProcessPins(), TlsCache()

    def __call__(self, settings: Settings) -> UploaderJob:
        if self._asking is not None and self._asking[0].is_claim_settled:
            self._took_over_for = self._asking[1]
        take_over = settings.archive.take_over and settings is not self._took_over_for
        writer = Writer(
            self._state.identity(), "run", take_over, self._state.path, pins=self._pins, tls=self._tls
        )
        if self._committed is not None:
            writer = replace(writer, committed=self._committed)
        job = UploaderJob(settings, writer, self._metrics)
        self._asking = job, settings
        return job

    def close(self) -> None:
        """No job comes any more."""
        self._pins.close()


class _Source:
    """What the admin server answers."""

    def __init__(self, service: Service, metrics: StoreMetrics, served: _Served) -> None:
        self._service = service
        self._served = served
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(StatusCollector(service.report))
        self._registry.register(ObjectStoreCollector(metrics))
        if served.proxy is not None:
            self._registry.register(ProxyCollector(served.proxy.status, served.proxy.counters))
        if served.slave is not None:
            self._registry.register(SlaveCollector(served.slave.status, served.slave.counters))

    def health(self) -> tuple[bool, str]:
        """See AdminSource."""
        thread = self._served.thread
        if thread is not None and not thread.is_alive:
            return False, "clients are not served"
        return self._service.health()

    def readiness(self) -> tuple[bool, str]:
        """See AdminSource."""
        return self._service.readiness()

    def status_json(self) -> bytes:
        """See AdminSource."""
        return encode_report(self._report())

    def metrics(self) -> bytes:
        """See AdminSource."""
        return generate_latest(self._registry)

    def _report(self) -> StatusReport:
        report = self._service.report()
        if report is None:
            raise UnavailableError("the uploader has not started yet")
        proxy, slave = self._served.proxy, self._served.slave
        return replace(
            report,
            serving=None if proxy is None else serving_report(proxy.status()),
            slave=None if slave is None else slave_report(slave.status()),
        )

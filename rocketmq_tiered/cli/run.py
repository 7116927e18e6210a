"""`tiered run`: follow a broker and archive its messages until stopped."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from rocketmq_tiered.cli.arguments import (
    add_places,
    add_switch,
    add_writer_flags,
    loaded_settings,
    settings_of,
)
from rocketmq_tiered.page.archive_view import ArchiveView
from rocketmq_tiered.page.page_requests import AdminPages, Process
from rocketmq_tiered.page.settings_table import CurrentSettings
from rocketmq_tiered.process.admin import AdminServer
from rocketmq_tiered.process.allocator import return_freed_memory
from rocketmq_tiered.process.broker_side import TlsCache, names_of, open_store_of, read_conf
from rocketmq_tiered.process.instance import (
    InstanceDescription,
    StateDirectory,
    default_state_dir,
    state_root,
)
from rocketmq_tiered.process.known_figures import KnownFigures
from rocketmq_tiered.process.lifecycle import EXIT_NOT_DRAINED, UploaderService
from rocketmq_tiered.process.logs import log_service
from rocketmq_tiered.process.metrics import (
    decoding_families,
    registry_of,
    status_families,
    store_families,
)
from rocketmq_tiered.process.report import StatusReport, encode_report
from rocketmq_tiered.process.serving import ServingThread, needs_account, open_handlers, services_of
from rocketmq_tiered.process.serving_metrics import serving_families
from rocketmq_tiered.process.uploader_job import ProcessPins, StandbyWatch, UploaderJob, Writer
from rocketmq_tiered.server.proxy.proxy_service import ProxyService
from rocketmq_tiered.server.proxy.relay_service import RelayService
from rocketmq_tiered.server.proxy.relay_status import RelayStatus
from rocketmq_tiered.server.slave.slave_service import SlaveService
from tiered.broker_store.conf import BrokerConf, BrokerNames
from tiered.catalog.state import CatalogState
from tiered.errors import StoreFullError, UsageError
from tiered.object_store.open_store import check_addresses
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.load import LoadedSettings
from tiered.settings.sections import Settings
from tiered.timestamps import wall_ms

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings that are usually given on the command line: store, archive, names, topics."""
    add_places(parser)
    add_writer_flags(parser)
    begin = "begin a new archive at the URL, even if this instance has archived there or elsewhere before"
    add_switch(parser, "--new-archive", "archive.new_archive", begin)
    parser.add_argument(
        "--abandon",
        type=int,
        metavar="N",
        help="with --new-archive: begin although the URL has N objects of an archive whose catalog is lost; they are "
        "kept unused",
    )


def execute(options: argparse.Namespace) -> int:
    """Run until a signal, or a failure that a retry cannot cure."""
    return_freed_memory()
    loaded = settings_of(options)
    settings = loaded.settings
    log_service(settings.process.log_level)
    if not settings.archive.url:
        raise UsageError("archive.url is not set", hint="give --url file:///… or s3://…")
    check_addresses(settings.archive.url, settings.object_store.endpoint_url)  # before they are logged
    conf = read_conf(settings)
    names, store_path = _names(settings, conf)
    directory = settings.process.state_dir or default_state_dir(os.environ, names.cluster, names.broker)
    with StateDirectory(Path(directory)) as state:
        metrics = StoreMetrics()
        services = services_of(settings, conf, names)
        thread = ServingThread(names, settings, services, partial(open_handlers, conf)) if services else None
        current = CurrentSettings(loaded, lambda: loaded_settings(options))
        view = ArchiveView(
            lambda: current.settings,
            (names.cluster, names.broker),
            lambda: None if thread is None else thread.access,
            metrics,
        )
        factory = _Factory(state, metrics, options.abandon, view, thread)
        figures = KnownFigures(state.path, (settings.archive.url, names.cluster, names.broker))
        service = UploaderService(
            loaded, factory=factory, surroundings=_Surroundings(current, figures, services, thread)
        )
        service.handle_signals()
        source = _Source(service, metrics, services, thread)
        pages = AdminPages(_process(source, current, names, thread), current, view)
        admin = AdminServer(
            settings.admin.host,
            settings.admin.port,
            source,
            host_names=settings.admin.host_names,
            pages=pages,
        )
        started_ms = wall_ms()
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
            state.describe(description, state_root(os.environ))
        except StoreFullError as error:
            # Other commands do not find this instance; archiving works.
            logger.warning(
                "tiered status will not find this instance, because its description cannot be written: %s",
                error,
            )
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
        # The interpreter would wait for threads that wait for the object store. Uncommitted messages are still in the
        # broker's log.
        sys.stderr.flush()
        os._exit(code)
    service.close()
    factory.close()
    return code


def _names(settings: Settings, conf: BrokerConf | None) -> tuple[BrokerNames, str]:
    with open_store_of(settings, conf) as store:
        return names_of(settings, store), str(store.path)


def _process(
    source: _Source,
    current: CurrentSettings,
    names: BrokerNames,
    thread: ServingThread | None,
) -> Process:
    """What the admin pages show of this process: its name and archive, its health, and where its reports come from."""
    return Process(
        "tiered run",
        f"{names.cluster}/{names.broker} in {current.settings.archive.url}",
        source.health,
        source.readiness,
        report=source.report,
        relays=source.relays,
        serving=lambda: None if thread is None else thread.access,
        shows_clients=thread is not None,
        has_accounts=lambda: needs_account(current.settings),
    )


class _Surroundings:
    """The rest of the process, for the uploader's service: the settings that its pages show, proxy and slave mode, and
    figures that are known from an earlier run."""

    def __init__(
        self,
        current: CurrentSettings,
        figures: KnownFigures,
        services: Sequence[RelayService[Any]],
        thread: ServingThread | None,
    ) -> None:
        """``services``: proxy and slave mode, as far as they are on; ``thread``: where they run, None if none is on."""
        self._current, self._figures, self._services, self._thread = current, figures, services, thread

    def loaded(self) -> LoadedSettings:
        """Read the settings again. Raises UsageError for wrong ones."""
        return self._current.reload()

    def apply(self, settings: Settings) -> None:
        """Apply what changes without a restart of the uploader."""
        self._current.apply(settings)
        if self._thread is not None:
            self._thread.apply(settings)

    def extended(self, report: StatusReport) -> StatusReport:
        """The uploader's status ``report`` with what others add: figures of an earlier run where new ones are not known
        yet, the status of proxy and slave mode, and the messages that their clients could not read."""
        report = self._figures.completed(report)
        if self._thread is not None and self._thread.access is not None:
            unreadable = {*report.unreadable, *self._thread.access.fetcher.unreadable.ranges()}
            report = replace(report, unreadable=tuple(sorted(unreadable)))
        for service in self._services:
            if isinstance(service, ProxyService):
                report = replace(report, proxy=service.status())
            elif isinstance(service, SlaveService):
                report = replace(report, slave=service.status())
        return report


class _Factory:
    """Builds an uploader for each start. ``archive.take_over`` is requested once after each load of the settings, until
    the archive was claimed or the claim was refused: a writer that another one has fenced later stays fenced."""

    def __init__(
        self,
        state: StateDirectory,
        metrics: StoreMetrics,
        abandons: int | None,
        view: ArchiveView | None = None,
        thread: ServingThread | None = None,
    ) -> None:
        """``abandons``: how many objects of a lost archive ``--abandon`` leaves unused; ``view`` and ``thread``: the
        pages and the client server of this process, which read the archive."""
        self._state, self._abandons = state, abandons
        self._view, self._thread = view, thread
        self._metrics = metrics
        self._took_over_for: Settings | None = None
        """The settings whose take-over was requested and answered."""
        self._claiming: tuple[UploaderJob, Settings] | None = None
        """The last uploader, and its settings."""
        self._pins, self._tls = ProcessPins(), TlsCache()
        self._standby = StandbyWatch(0)

    def __call__(self, settings: Settings) -> UploaderJob:
        """Build the next uploader. It requests a take-over if ``settings`` say so and no uploader with the same loaded
        settings has had its claim won or refused."""
        if self._claiming is not None and self._claiming[0].offloader.is_claim_settled:
            self._took_over_for = self._claiming[1]
        take_over = settings.archive.take_over and settings is not self._took_over_for
        self._standby.lag_ms = settings.process.take_over_lag_ms
        writer = Writer(
            self._state.identity(),
            "run",
            take_over,
            self._state.path,
            committed=self._committed,
            pins=self._pins,
            tls=self._tls,
            standby=self._standby if settings.process.when_fenced == "standby" else None,
            new_archive=settings.archive.new_archive,
            abandons=self._abandons,
            reads=self._reads,
        )
        job = UploaderJob(settings, writer, self._metrics)
        self._claiming = job, settings
        return job

    def _committed(self, state: CatalogState) -> None:
        """Show a state that was committed to the readers in this process, so that they need not load it."""
        for reader in (self._view, self._thread):
            if reader is not None:
                reader.adopt(state)

    def _reads(self) -> int:
        """Reads by clients so far: while there are new ones, tasks of the archive wait."""
        if self._thread is None or self._thread.access is None:
            return 0
        cache = self._thread.access.source.statistics()
        return cache.hits + cache.misses

    def close(self) -> None:
        """Release the pins' descriptors."""
        self._pins.close()


class _Source:
    """Contents of the admin server's pages."""

    def __init__(
        self,
        service: UploaderService,
        metrics: StoreMetrics,
        services: Sequence[RelayService[Any]],
        thread: ServingThread | None,
    ) -> None:
        """``services``: proxy and slave mode, as far as they are on; ``thread``: where they run, None if both are off.
        The metrics are those of the process, the uploader, the object store and the services."""
        self._service, self._services, self._thread = service, services, thread
        self._registry = registry_of(
            lambda: status_families(service.report()),
            partial(store_families, metrics),
            decoding_families,
            *(partial(serving_families, served) for served in services),
        )

    def health(self) -> tuple[bool, str]:
        """Whether the process works, and why not."""
        if self._thread is not None and not self._thread.is_alive:
            return False, "client server stopped"
        return self._service.health()

    def readiness(self) -> tuple[bool, str]:
        """Whether it archives or stands by, and why not."""
        return self._service.readiness()

    def status_json(self) -> bytes:
        """The status report as JSON."""
        return encode_report(self._service.report())

    def metrics(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def report(self) -> StatusReport | None:
        """The uploader's report."""
        return self._service.report()

    def relays(self) -> list[RelayStatus]:
        """The relays of proxy and slave mode."""
        return [service.status() for service in self._services]

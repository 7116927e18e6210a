"""`tiered serve`: serve an archive to RocketMQ clients and mqadmin, without a broker."""

import argparse
import asyncio
import gc
import logging
import signal
import sys

from fetcher.access import ArchiveAccess, open_async_access
from rocketmq_tiered.cli.arguments import SERVE_FLAGS, add_archive, settings_of
from rocketmq_tiered.page.archive_view import ArchiveView
from rocketmq_tiered.page.page_requests import AdminPages, Process
from rocketmq_tiered.page.settings_table import CurrentSettings
from rocketmq_tiered.process.admin import AdminServer
from rocketmq_tiered.process.archive_admin import ArchiveAdminSource
from rocketmq_tiered.process.event_queue import was_received
from rocketmq_tiered.process.group_reset import is_gone, own_name
from rocketmq_tiered.process.logs import log_service
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.backend.served_archive import ServedArchive
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.listen.options import MemoryShares
from rocketmq_tiered.server.retries.retry_log import RetryLog
from rocketmq_tiered.server.retries.retry_queue import RetryLimits, RetryQueues
from tiered.clock import MACHINE_CLOCK
from tiered.console import print_lines
from tiered.errors import UsageError
from tiered.settings.load import LoadedSettings
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the addresses, and ``--take-over-groups``."""
    add_archive(parser, SERVE_FLAGS)
    parser.add_argument(
        "--take-over-groups",
        action="store_true",
        help="become the owner of the consumer groups' offsets even if another server of this archive is",
    )


def execute(options: argparse.Namespace) -> int:
    """Serve the archive to RocketMQ clients until SIGTERM or SIGINT."""
    loaded = settings_of(options)
    settings = loaded.settings
    log_service(settings.process.log_level)
    access = open_async_access(
        options.url, cluster=settings.archive.cluster, broker=settings.archive.broker, settings=settings
    )
    try:
        asyncio.run(_serve(access, loaded, take_over=options.take_over_groups))
    finally:
        access.close()
    return 0


async def _serve(access: ArchiveAccess, loaded: LoadedSettings, *, take_over: bool) -> None:
    """Serve until SIGTERM or SIGINT. If another server of the archive owns the consumer groups' offsets, messages are
    served and offsets are not stored; ``take_over`` becomes their owner all the same."""
    settings = loaded.settings
    memory = MemoryShares(settings.serve.memory_bytes)
    archive = ServedArchive(access)
    await archive.load()
    log = GroupLog(access.store, own_name(), MACHINE_CLOCK, is_gone=is_gone, generation_of=access.generation)
    offsets = GroupOffsets(
        log, lease_ms=settings.serve.lease_ms, take_over=take_over, bytes_max=memory.offsets
    )
    limits = RetryLimits(memory.retries, settings.serve.dead_letter_keep_ms)
    retries = RetryQueues(RetryLog(access.store, own_name()), offsets, limits, MACHINE_CLOCK)
    service = ArchiveService(archive, offsets, retries, settings.serve)
    service.earliest_ms = archive.earliest_stored_ms
    source, admin = ArchiveAdminSource(access, service, lambda: archive.problem), settings.admin
    pages = _pages(access, service, source, loaded)
    port = AdminServer(admin.host, admin.port, source, host_names=admin.host_names, pages=pages)
    logger.info("started", extra={"admin": port.url, "archive": access.title})
    tasks = [
        asyncio.create_task(archive.watch(settings.serve.refresh_ms / 1000)),
        asyncio.create_task(source.beat()),
    ]
    try:
        await _serve_until_signal(service, source, settings, access.title)
    finally:
        for task in tasks:
            task.cancel()
        port.close()


def _pages(
    access: ArchiveAccess, service: ArchiveService, source: ArchiveAdminSource, loaded: LoadedSettings
) -> AdminPages:
    """The pages of the admin port of `tiered serve`, which show the archive and the clients of ``service``."""
    current = CurrentSettings(loaded)
    view = ArchiveView(lambda: current.settings, (access.cluster, access.broker), lambda: access)
    process = Process(
        "tiered serve",
        access.title,
        source.health,
        source.readiness,
        served=service.status,
        serving=lambda: access,
        shows_clients=True,
        has_accounts=lambda: bool(loaded.settings.serve.acl_file),
    )
    return AdminPages(process, current, view)


async def _serve_until_signal(
    service: ArchiveService, source: ArchiveAdminSource, settings: Settings, title: str
) -> None:
    """Listen at the address of serve.bind and serve until SIGTERM or SIGINT. SIGHUP is logged and ignored: it would end
    the process, and `tiered serve` cannot reload its settings."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    early = signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, _log_sighup)
    if was_received(early):  # while the modules were loaded
        _log_sighup()
    try:
        address = await service.start()
    except OSError as error:
        raise UsageError(
            f"cannot listen on {settings.serve.bind}: {error}", hint="choose another address with --bind"
        ) from error
    # Objects made so far stay: a full collection over them would delay pulls by 0.05 s.
    gc.collect()
    gc.freeze()
    source.address = address
    logger.info(
        "serving", extra={"address": address, "archive": title, "owns_groups": service.offsets.is_owner}
    )
    print_lines(f"serving {title} at {address}", file=sys.stderr)
    await stop.wait()
    await service.close(drain_s=min(5.0, settings.process.drain_timeout_ms / 1000))
    logger.info("ended")


def _log_sighup() -> None:
    logger.warning("SIGHUP has no effect: tiered serve reads its settings at the start")

"""`tiered mount`: serve retired brokers under their names, shared with other nodes; `mount ls` lists them."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from rocketmq_tiered.cli.arguments import (
    MOUNT_FLAGS,
    STORE_FLAGS,
    add_json,
    add_setting_flags,
    settings_of,
)
from rocketmq_tiered.page.mounts import MountPages
from rocketmq_tiered.process.admin import AdminServer
from rocketmq_tiered.process.broker_side import tls_of
from rocketmq_tiered.process.logs import log_service
from rocketmq_tiered.process.mount_report import HEADER, MountAdminSource, mount_rows
from rocketmq_tiered.server.listen.options import advertised_host
from rocketmq_tiered.server.mount.membership import Membership
from rocketmq_tiered.server.mount.mount_node import TAKES_MAX, MountNode
from rocketmq_tiered.server.mount.mounted_archive import MountPlace
from tiered.clock import MACHINE_CLOCK
from tiered.console import camel_names, print_json, print_lines, print_table
from tiered.errors import UnavailableError, UsageError
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the URLs of archives (or ``ls`` and URLs), and the flags of a mount node."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="+",
        help="serve the retired brokers whose archives are below this URL, such as s3://bucket/prefix; with the word "
        "ls before it: list these brokers",
    )
    add_setting_flags(parser, STORE_FLAGS, MOUNT_FLAGS)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """List the retired brokers below the URLs after ``ls``; else serve them, with other nodes, until SIGTERM or
    SIGINT."""
    settings = settings_of(options).settings
    if options.url[0] == "ls":
        return _list(options.url[1:], settings, as_json=options.json)
    if not settings.broker.name_servers:
        raise UsageError("no name servers are set", hint="give --name-servers HOST:PORT")
    log_service(settings.process.log_level)
    with ExitStack() as opened:
        stores = [open_store(url, StoreOptions(settings.object_store)) for url in options.url]
        for store in stores:
            opened.callback(store.close)
        node = settings.mount.node or os.uname().nodename
        members = [Membership(store, node, MACHINE_CLOCK) for store in stores]
        places = zip(options.url, stores, members, strict=True)
        nodes = [MountNode(_place(settings, *place)) for place in places]
        asyncio.run(_serve(nodes, settings))
    return 0


def _place(settings: Settings, url: str, store: ObjectStore, member: Membership) -> MountPlace:
    mount = settings.mount
    host = mount.advertise or advertised_host(mount.bind, setting="mount.advertise")
    return MountPlace(url, store, settings, member, host, settings.broker.name_servers, tls_of(settings))


async def _serve(nodes: Sequence[MountNode], settings: Settings) -> None:
    """Serve the brokers until SIGTERM or SIGINT; then give them to other nodes before the process ends. ``nodes``: this
    process at each URL."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2 * TAKES_MAX))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    source, admin = MountAdminSource(nodes), settings.admin
    port = AdminServer(admin.host, admin.port, source, host_names=admin.host_names, pages=MountPages(source))
    logger.info("started", extra={"admin": port.url, "node": nodes[0].member.node})
    print_lines(
        f"node {nodes[0].member.node} mounts retired brokers; admin page: {port.url}", file=sys.stderr
    )
    beat = asyncio.create_task(source.beat())
    for node in nodes:
        node.start()
    try:
        await stop.wait()
        logger.info("draining: brokers are given to other nodes")
        await asyncio.gather(*(node.drain() for node in nodes))
        logger.info("ended")
    finally:
        beat.cancel()
        await asyncio.to_thread(port.close)


def _list(urls: Sequence[str], settings: Settings, *, as_json: bool) -> int:
    """Print the retired brokers below each URL, and which node serves them. Exit code 4 if one of them is not served
    as it should be."""
    if not urls:
        raise UsageError("tiered mount ls requires a URL", hint="tiered mount ls s3://bucket/prefix")
    rows = []
    for url in urls:
        store = open_store(url, StoreOptions(settings.object_store))
        try:
            rows += mount_rows(store)
        finally:
            store.close()
    if as_json:
        print_json({"brokers": [camel_names(row.document()) for row in rows]})
    else:
        print_table(HEADER, [row.cells() for row in rows])
    return UnavailableError.exit_code if any(row.is_bad for row in rows) else 0

"""Slave mode as a port of `tiered run`: its place from the settings, and what answers from the archive, wired.

Owns the refusals of impossible places and the policies of a slave. Does not own what is served
(server/slave).
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace

from fetcher.access import ArchiveAccess
from server.listen.options import parse_address
from server.proxy.proxy_handlers import ProxyHandlers
from server.slave.pull_redirect import RedirectContext, SlavePulls
from server.slave.registration import SlaveConfig
from server.slave.slave_service import SlaveOptions, SlaveService
from sidecar.broker_side import credentials_of, tls_of
from sidecar.proxy_answers import MergedAnswers
from sidecar.proxy_place import neighbours
from sidecar.serving_thread import Port
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.names import BrokerNames
from tiered.errors import UsageError
from tiered.settings.sections import ReadSettings, Settings

DISABLE, FORCE = "DISABLE", "FORCE"


def slave_config(settings: Settings, conf: BrokerConf | None, broker: str) -> SlaveConfig:
    """The place of the slave of ``broker``. Raises UsageError naming what is missing or impossible."""
    slave = settings.slave
    address, name_servers = neighbours(settings, conf, "slave")
    if slave.advertise == settings.serve.advertise:
        raise UsageError(
            f"slave.advertise = {slave.advertise!r} is serve.advertise, too",
            hint="give each a port of its own: their clients are answered differently",
        )
    host, port = parse_address(slave.advertise, "slave.advertise")
    if port == 0:
        raise UsageError("slave.advertise names no port", hint="name the port that clients dial")
    others = [parse_address(other, "")[0] for other in (address, *name_servers)]
    if _is_loopback(host) and not all(map(_is_loopback, others)):
        raise UsageError(
            f"slave.advertise = {slave.advertise!r} would lead every client to its own host",
            hint="name this host as clients see it",
        )
    return SlaveConfig(broker, address, name_servers, slave.advertise, slave.broker_id, tls_of(settings))


def slave_policies(read: ReadSettings) -> ReadSettings:
    """The read policies of a slave: what is archived comes from the archive, as who is sent here burdens the broker;
    topics with DISABLE stay the broker's."""
    patterns = tuple(
        f"{pattern}={DISABLE if name == DISABLE else FORCE}" for pattern, name in read.patterns()
    )
    policy = DISABLE if read.default_policy() == DISABLE else FORCE
    return replace(read, policy=policy, topic_policies=patterns)


class SlaveAnswers:
    """See serving_thread.Answers: the proxy's answers under a slave's policies, and where clients go next."""

    def __init__(self, merged: MergedAnswers, around: RedirectContext) -> None:
        self._merged = merged
        pulls = SlavePulls(merged.handlers, merged.line, merged.views, around)
        self.handlers: ProxyHandlers = {**merged.handlers, **pulls.handlers()}

    def apply(self, settings: Settings) -> None:
        """See Answers."""
        self._merged.apply(replace(settings, read=slave_policies(settings.read)))

    def committed(self) -> None:
        """See Answers."""
        self._merged.committed()

    def close(self) -> None:
        """See Answers."""
        self._merged.close()


def slave_port(settings: Settings, conf: BrokerConf | None, names: BrokerNames) -> tuple[SlaveService, Port]:
    """The slave and its port, not started. Raises UsageError."""
    place = slave_config(settings, conf, names.broker)
    bind = settings.slave.bind
    host, _ = parse_address(bind, "slave.bind")
    if _is_loopback(host) and not _is_loopback(parse_address(place.advertise, "slave.advertise")[0]):
        # Listing, but out of reach: consumers that are sent here would wait for ever.
        raise UsageError(
            f"nobody reaches slave.advertise = {place.advertise!r} while slave.bind is {bind!r}",
            hint="bind to an address of the host, such as 0.0.0.0:10931",
        )
    serve = replace(settings.serve, bind=bind)
    file = conf.properties if conf is not None else None
    side = SlaveOptions(
        place, names.cluster, serve, settings.slave.register_ms / 1000, file, credentials_of(settings)
    )
    service = SlaveService(side)

    async def answers(access: ArchiveAccess) -> SlaveAnswers:
        as_slave = replace(settings, read=slave_policies(settings.read))
        merged = await MergedAnswers.opened(access, service.clients, as_slave, conf)
        around = RedirectContext(
            place.broker_id,
            lambda: service.watch.is_well,
            settings.serve.hold_ms_max / 1000,
            counters=service.counters.pulls,
        )
        return SlaveAnswers(merged, around)

    return service, Port(service, bind, "slave.bind", answers)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"

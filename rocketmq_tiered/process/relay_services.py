"""The services of proxy and slave mode that the settings enable: addresses, and what they must know of the broker."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from fetcher.policy.read_policy import ReadPolicies
from rocketmq_tiered.process.broker_side import (
    address_of,
    credentials_of,
    name_servers_of,
    read_conf,
    tls_of,
)
from rocketmq_tiered.server.listen.options import check_advertised, is_loopback, parse_address
from rocketmq_tiered.server.proxy.proxy_service import ProxyConfig, ProxyService
from rocketmq_tiered.server.proxy.relay_service import RelayService
from rocketmq_tiered.server.proxy.timer_gateway import GatewayConfig
from rocketmq_tiered.server.slave.registration import SlaveConfig
from rocketmq_tiered.server.slave.slave_service import SlaveOptions, SlaveService
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.names import BrokerNames
from tiered.errors import TieredError, UsageError
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)


def proxy_config(settings: Settings, conf: BrokerConf | None, broker: str) -> ProxyConfig:
    """Addresses of proxy mode. Raises UsageError for a missing or impossible one."""
    address, name_servers = _upstream_addresses(settings, conf, "serve")
    timers, serve = settings.timers, settings.serve
    gateway = GatewayConfig(
        timers.topic, timers.max_delay_ms, timers.ahead_ms, credentials_of(settings), bool(serve.acl_file)
    )
    return ProxyConfig(
        broker,
        address,
        name_servers,
        serve.advertise,
        tls_of(settings),
        checks_clients(conf),
        judges_locks(conf),
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
            hint="set it to this host as clients see it",
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
    """The services that the settings enable, not started. Raises UsageError for impossible addresses."""
    services: list[RelayService[Any]] = []
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
            judges_locks=judges_locks(conf),
        )
        services.append(SlaveService(options))
    if services and settings.broker.tls and not settings.serve.tls_certificate:
        logger.warning(
            "clients connect without TLS although the broker uses it: serve.tls_certificate is not set"
        )
    elif (
        conf is not None
        and checks_clients(conf)
        and not (settings.serve.acl_file or settings.serve.tls_certificate)
    ):
        # With serve.acl_file the service warns.
        exposed = [s.bind for s in services if not is_loopback(parse_address(s.bind, f"{s.section}.bind")[0])]
        if exposed:
            logger.warning(
                "clients sign requests to the broker on connections without TLS, which others can read and repeat: "
                "set serve.tls_certificate",
                extra={"bind": exposed},
            )
    return services


def checks_clients(conf: BrokerConf | None) -> bool:
    """Whether the broker has access control; assumed if there is no configuration file."""
    if conf is None:
        return True
    return any(_is_on(conf, name) for name in ("aclEnable", "authenticationEnabled", "authorizationEnabled"))


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


def judges_locks(conf: BrokerConf | None) -> bool:
    """Whether the broker's access control judges queue locks, if it is of 5.x. ACL 1.0, which it may have instead, does
    not."""
    return conf is not None and (_is_on(conf, "authorizationEnabled") or not _is_on(conf, "aclEnable"))


def _is_on(conf: BrokerConf, name: str) -> bool:
    return conf.properties.get(name, "").strip().lower() == "true"

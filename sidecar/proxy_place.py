"""Where a port stands, from settings and broker.conf: the real broker, its name servers, the address clients dial.

Pure but for the settings it reads; owns the refusals of places that would lead clients in a circle.
"""

from __future__ import annotations

import re

from server.listen.options import parse_address
from server.listen.own_address import check_advertised
from server.proxy.proxy_service import ProxyConfig
from sidecar.broker_side import address_of, tls_of
from tiered.broker_store.conf import BrokerConf
from tiered.errors import UsageError
from tiered.settings.sections import Settings


def proxy_config(settings: Settings, conf: BrokerConf | None, broker: str) -> ProxyConfig:
    """The place of the proxy of ``broker``. Raises UsageError naming what is missing or impossible."""
    advertise, (address, name_servers) = settings.serve.advertise, neighbours(settings, conf, "serve")
    return ProxyConfig(broker, address, name_servers, advertise, tls_of(settings))


def neighbours(settings: Settings, conf: BrokerConf | None, section: str) -> tuple[str, tuple[str, ...]]:
    """The broker's address and its name servers, for what ``section`` advertises. Raises UsageError naming what is
    missing or impossible."""
    key, advertise = f"{section}.advertise", getattr(settings, section).advertise
    check_advertised(advertise, section)
    address = address_of(settings, conf)
    if not address:
        raise UsageError(
            f"{key} is set, but where is the broker?",
            hint="set broker.address, or brokerIP1 in broker.conf",
        )
    name_servers = settings.broker.name_servers or _listed(conf)
    if not name_servers:
        raise UsageError(
            f"{key} is set, but where are the name servers?",
            hint="set broker.name_servers, or namesrvAddr in broker.conf",
        )
    for server in name_servers:
        parse_address(server, "broker.name_servers")
    if advertise in (address, *name_servers):
        raise UsageError(
            f"{key} = {advertise!r} is the address of the broker or a name server itself",
            hint="it must lead to this process",
        )
    return address, name_servers


def _listed(conf: BrokerConf | None) -> tuple[str, ...]:
    text = conf.properties.get("namesrvAddr", "") if conf is not None else ""
    return tuple(part for part in re.split(r"[;,\s]+", text) if part)

"""The default address that clients dial: the bound one, or this machine's if that is a wildcard.

RocketMQ's brokers use the first interface that is not loopback. Here it is the source address of outgoing packets, the
likelier one on a machine in several networks. Either is a guess: it is logged, and ``serve.advertise`` replaces it.
Sources: NetworkUtil.getLocalAddress, BrokerConfig.brokerIP1.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Final

from rocketmq_tiered.server.listen.options import parse_address
from tiered.errors import UsageError

_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Reserved for documentation. Nothing is sent: a datagram socket only selects its route."""
_PORT: Final = 9


def is_wildcard(host: str) -> bool:
    """Whether ``host`` is a wildcard address, which cannot be dialled."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine for itself only."""
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def check_advertised(advertise: str, section: str) -> None:
    """Raises UsageError for an address no client can dial. ``section``: of the settings, named in the error."""
    key = f"{section}.advertise"
    if is_wildcard(parse_address(advertise, key)[0]):
        raise UsageError(
            f"{key} = {advertise} is not an address that clients can dial",
            hint=f"set it to this host as clients see it; {section}.bind is the address to listen on",
        )


def outgoing_address(family: int) -> str | None:
    """This machine's address of a family as other hosts see it; None without a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE[socket.AddressFamily(family)], _PORT))
            host = str(probe.getsockname()[0])
    except OSError:
        return None
    address = ipaddress.ip_address(host.partition("%")[0])
    return None if address.is_loopback or address.is_unspecified or address.is_link_local else host


def advertised_host(
    bound_host: str, *, setting: str = "serve.advertise", own: Callable[[int], str | None] = outgoing_address
) -> str:
    """The host that clients dial for a port on ``bound_host``. Raises UsageError if it cannot be determined."""
    if not is_wildcard(bound_host):
        return bound_host
    families = [socket.AF_INET] if "." in bound_host else [socket.AF_INET, socket.AF_INET6]
    found = next((host for family in families if (host := own(family)) is not None), None)
    if found is None:
        raise UsageError(
            f"no address found that clients can dial: {bound_host} is a wildcard",
            hint=f"set {setting} (--advertise HOST:PORT) to this host as clients see it",
        )
    return found

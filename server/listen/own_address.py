"""The address that clients dial where nobody named one: that of the port, or this machine's where it is any of them.

RocketMQ's brokers take the first address of an interface that is no loopback; here it is the one that packets to the
rest of the network leave from, which on a machine of several networks is the more likely one. Either is a guess: it is
said in the log, and ``serve.advertise`` ends it. Sources: NetworkUtil.getLocalAddress, BrokerConfig.brokerIP1.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Final

from server.listen.options import parse_address
from tiered.errors import UsageError

_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of nobody, kept for documentation. Nothing is sent: a datagram's socket only chooses its way."""
_PORT: Final = 9


def is_wildcard(host: str) -> bool:
    """Whether it is every address of a machine, and none that can be dialled."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def check_advertised(advertise: str, section: str) -> None:
    """Raises UsageError for what no client can dial. ``section``: of the settings, for its words."""
    key = f"{section}.advertise"
    if is_wildcard(parse_address(advertise, key)[0]):
        raise UsageError(
            f"{key} = {advertise!r} is no address that clients can dial",
            hint=f"name this host as clients see it; {section}.bind says where to listen",
        )


def outgoing_address(family: int) -> str | None:
    """This machine's address of a family, as others may see it; None without a way to them."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((_ELSEWHERE[socket.AddressFamily(family)], _PORT))
            host = str(asking.getsockname()[0])
    except OSError:
        return None
    address = ipaddress.ip_address(host.partition("%")[0])
    return None if address.is_loopback or address.is_unspecified or address.is_link_local else host


def advertised_host(
    bound_host: str, *, setting: str = "serve.advertise", own: Callable[[int], str | None] = outgoing_address
) -> str:
    """The host that clients dial for a port on ``bound_host``. Raises UsageError where this machine's is not known."""
    if not is_wildcard(bound_host):
        return bound_host
    families = [socket.AF_INET] if "." in bound_host else [socket.AF_INET, socket.AF_INET6]
    found = next((host for family in families if (host := own(family)) is not None), None)
    if found is None:
        raise UsageError(
            f"the port is on every address ({bound_host}), and none of them is known that clients could dial",
            hint=f"set {setting} (--advertise HOST:PORT): this host as clients see it",
        )
    return found

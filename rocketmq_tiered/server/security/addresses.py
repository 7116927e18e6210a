"""Address patterns of ACL files: ``*``, ``10.0.*.*``, ``10.0.0.1-9``, ``10.0.0.{1,7}``, lists with commas; CIDR. Pure.

Source: org.apache.rocketmq.acl.plain.RemoteAddressStrategyFactory; IPAddressUtils for CIDR.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

_COMMA_OUTSIDE_BRACES = re.compile(r",(?![^{]*\})")


@lru_cache(maxsize=4096)
def host_of(address: str) -> str:
    """The host of ``host:port`` or ``[host]:port``."""
    return address.rpartition(":")[0].strip("[]")


_ALL_HOSTS = frozenset({"*", "*.*.*.*", "*:*:*:*:*:*:*:*"})
"""Wildcards for all hosts of both families, as at a broker."""


def matches(pattern: str, host: str) -> bool:
    """Whether ``host``, an IP address, matches ``pattern``; an empty pattern matches nothing."""
    return any(_matches_one(one.strip(), host) for one in _COMMA_OUTSIDE_BRACES.split(pattern))


def is_valid(pattern: str) -> bool:
    """Whether ``pattern`` parses: a typing error must not change access unnoticed."""
    return all(_is_valid_one(one.strip()) for one in _COMMA_OUTSIDE_BRACES.split(pattern))


def _is_valid_one(pattern: str) -> bool:
    if pattern == "*":
        return True
    if "/" in pattern:
        return _network(pattern) is not None
    separator = ":" if ":" in pattern else "."
    segments = pattern.split(separator)
    if separator == "." and len(segments) != 4:
        return False
    return all(re.fullmatch(r"\*|[0-9A-Fa-f]*(-[0-9A-Fa-f]+)?|\{[0-9A-Fa-f, ]+\}", s) for s in segments)


def _matches_one(pattern: str, host: str) -> bool:
    if not pattern:
        return False
    if pattern in _ALL_HOSTS:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if "/" in pattern:
        network = _network(pattern)
        return network is not None and address.version == network.version and address in network
    if address.version == 6 and not any(mark in pattern for mark in "*-{"):
        try:
            return ipaddress.ip_address(pattern) == address
        except ValueError:
            return False
    separator, base = (".", 10) if address.version == 4 else (":", 16)
    wanted, given = pattern.split(separator), address.exploded.split(separator)
    return len(wanted) == len(given) and all(
        _segment_matches(one, int(number, base), base) for one, number in zip(wanted, given, strict=True)
    )


def _segment_matches(segment: str, number: int, base: int) -> bool:
    if segment == "*":
        return True
    try:
        if segment.startswith("{"):
            return number in [int(one, base) for one in segment.strip("{}").split(",")]
        low, _, high = segment.partition("-")
        return int(low, base) <= number <= int(high or low, base)
    except ValueError:
        return False


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None

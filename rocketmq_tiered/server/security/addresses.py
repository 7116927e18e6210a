"""Address patterns of ACL files: ``*``, ``10.0.*.*``, ``10.0.0.1-9``, ``10.0.0.{1,7}``, lists with commas; CIDR. Pure.

Source: org.apache.rocketmq.acl.plain.RemoteAddressStrategyFactory; IPAddressUtils for CIDR.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

_COMMA_OUTSIDE_BRACES = re.compile(r",(?![^{]*\})")


@lru_cache(maxsize=4096)
def host_of(address: str) -> str:
    """The host of ``host:port`` or ``[host]:port``."""
    return address.rpartition(":")[0].strip("[]")


_ALL_HOSTS = frozenset({"*", "*.*.*.*", "*:*:*:*:*:*:*:*"})
"""Wildcards for all hosts of both families, as at a broker."""
_MARKS = "*-{"
_network = partial(ipaddress.ip_network, strict=False)
T = TypeVar("T")


def matches(pattern: str, host: str) -> bool:
    """Whether ``host``, an IP address, matches ``pattern``; an empty pattern matches nothing."""
    return any(_matches_one(one.strip(), host) for one in _COMMA_OUTSIDE_BRACES.split(pattern))


def is_valid(pattern: str) -> bool:
    """Whether ``pattern`` parses: a typing error must not change access unnoticed."""
    return all(_is_valid_one(one.strip()) for one in _COMMA_OUTSIDE_BRACES.split(pattern))


def _is_valid_one(pattern: str) -> bool:
    """Whether one pattern of a list is an address, a network, or has a range in each of its parts."""
    if pattern in _ALL_HOSTS:
        return True
    if "/" in pattern:
        return _parsed(_network, pattern) is not None
    if not any(mark in pattern for mark in _MARKS):
        return _parsed(ipaddress.ip_address, pattern) is not None
    separator, base, size, last = (":", 16, 8, 0xFFFF) if ":" in pattern else (".", 10, 4, 255)
    parts = [_ranges(segment, base) for segment in pattern.split(separator)]
    return len(parts) == size and all(
        part and all(0 <= low <= high <= last for low, high in part) for part in parts
    )


def _matches_one(pattern: str, host: str) -> bool:
    """Whether one pattern of a list has the address; an empty pattern has none."""
    if not pattern:
        return False
    if pattern in _ALL_HOSTS:
        return True
    address = _parsed(ipaddress.ip_address, host)
    if address is None:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    if "/" in pattern:
        network = _parsed(_network, pattern)
        return network is not None and address.version == network.version and address in network
    if not any(mark in pattern for mark in _MARKS):
        return _parsed(ipaddress.ip_address, pattern) == address
    separator, base = (".", 10) if address.version == 4 else (":", 16)
    wanted, given = pattern.split(separator), address.exploded.split(separator)
    return len(wanted) == len(given) and all(
        any(low <= int(number, base) <= high for low, high in _ranges(one, base))
        for one, number in zip(wanted, given, strict=True)
    )


def _ranges(segment: str, base: int) -> list[tuple[int, int]]:
    """The numbers that a segment matches, from and to; none if it does not parse."""
    if segment == "*":
        return [(0, 0xFFFF if base == 16 else 255)]
    try:
        if segment.startswith("{") and segment.endswith("}"):
            return [(int(one, base), int(one, base)) for one in segment[1:-1].split(",")]
        low, _, high = segment.partition("-")
        return [(int(low, base), int(high or low, base))]
    except ValueError:
        return []


def _parsed(parse: Callable[[str], T], text: str) -> T | None:
    try:
        return parse(text)
    except ValueError:
        return None

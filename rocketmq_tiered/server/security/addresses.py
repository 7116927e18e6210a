"""Address patterns of ACL files: ``*``, ``10.0.*.*``, ``10.0.0.1-9``, ``10.0.0.{1,7}``, lists with commas; CIDR. Pure.

Source: org.apache.rocketmq.acl.plain.RemoteAddressStrategyFactory; IPAddressUtils for CIDR.
"""

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
    """Return whether one pattern of a list is an address, a network, or an address with ranges: numbers, ``*``,
    ``1-9`` or ``{1,7}`` between the separators."""
    if pattern in _ALL_HOSTS:
        return True
    if "/" in pattern:
        return _parsed(_network, pattern) is not None
    if not any(mark in pattern for mark in _MARKS):
        return _parsed(ipaddress.ip_address, pattern) is not None
    separator, base, size, last = (":", 16, 8, 0xFFFF) if ":" in pattern else (".", 10, 4, 255)
    segments = [_ranges(segment, base) for segment in pattern.split(separator)]
    return len(segments) == size and all(
        ranges and all(0 <= low <= high <= last for low, high in ranges) for ranges in segments
    )


def _matches_one(pattern: str, host: str) -> bool:
    """Return whether the IP address ``host`` matches one pattern of a list: an address, a network such as 10.0.0.0/8,
    or an address with ranges such as 10.0.*.1-9. An empty pattern matches none."""
    if not pattern:
        return False
    if pattern in _ALL_HOSTS:
        return True
    address = _parsed(ipaddress.ip_address, host)
    if address is None:
        return False
    address = getattr(address, "ipv4_mapped", None) or address  # ::ffff:10.0.0.1 is 10.0.0.1
    if "/" in pattern:
        network = _parsed(_network, pattern)
        return network is not None and address.version == network.version and address in network
    if not any(mark in pattern for mark in _MARKS):
        return _parsed(ipaddress.ip_address, pattern) == address
    separator, base = (".", 10) if address.version == 4 else (":", 16)
    segments, numbers = pattern.split(separator), address.exploded.split(separator)
    return len(segments) == len(numbers) and all(
        any(low <= int(number, base) <= high for low, high in _ranges(segment, base))
        for segment, number in zip(segments, numbers, strict=True)
    )


def _ranges(segment: str, base: int) -> list[tuple[int, int]]:
    """Return the ranges of numbers, first and last, that a segment of a pattern (``7``, ``*``, ``1-9``, ``{1,7}``)
    matches; none if it does not parse. ``base``: 10 for IPv4, 16 for IPv6."""
    if segment == "*":
        return [(0, 0xFFFF if base == 16 else 255)]
    try:
        if segment.startswith("{") and segment.endswith("}"):
            return [(int(number, base), int(number, base)) for number in segment[1:-1].split(",")]
        low, _, high = segment.partition("-")
        return [(int(low, base), int(high or low, base))]
    except ValueError:
        return []


def _parsed(parse: Callable[[str], T], text: str) -> T | None:
    try:
        return parse(text)
    except ValueError:
        return None

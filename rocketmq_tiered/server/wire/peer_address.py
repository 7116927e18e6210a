"""The client address used in logs, rules and routes. Pure."""

from __future__ import annotations

import ipaddress


def known_address(host: str, port: int | str) -> str:
    """``host:port``; an IPv4-mapped IPv6 address (``::ffff:10.0.0.1``) becomes its IPv4 address."""
    if ":" in host:
        try:
            found = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return f"{host}:{port}"
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        if mapped is not None:
            return f"{mapped}:{port}"
    return f"{host}:{port}"

"""The address of a client as logs, rules and routes know it. Pure."""

from __future__ import annotations

import ipaddress


def known_address(host: str, port: int | str) -> str:
    """``host:port``. An IPv4 client of a port that takes both families (``::ffff:10.0.0.1``) is its IPv4 address."""
    if ":" in host:
        try:
            found = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return f"{host}:{port}"
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        if mapped is not None:
            return f"{mapped}:{port}"
    return f"{host}:{port}"

"""Settings of `tiered mount`."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.settings.declaration import setting


@dataclass(frozen=True)
class MountSettings:
    """`tiered mount`: retired brokers served under their names. Limits, TLS and access rules are those of `[serve]`,
    name servers those of `[broker]`."""

    node: str = setting(
        "", "name of this node among those that share the brokers; empty: the host's", restart=True
    )
    advertise: str = setting(
        "", "host in routes, to which clients connect; empty: this machine's", restart=True
    )
    bind: str = setting("127.0.0.1", "host to listen on; 0.0.0.0: all of this machine", restart=True)
    first_port: int = setting(
        10_940,
        "first of up to 500 ports, one for each mounted broker; 0: any free ones",
        minimum=0,
        maximum=65_535,
        restart=True,
    )
    ports: int = 500
    """Ports that may be used: more brokers than a node can hold."""

"""Listener options from the settings: address, limits, shares of ``serve.memory_bytes``, TLS, access rules; and the
address that clients dial. Raises UsageError naming the setting.

The default address is the bound one, or this machine's if that is a wildcard. RocketMQ's brokers use the first
interface that is not loopback. Here it is the source address of outgoing packets, the likelier one on a machine in
several networks. Either is a guess: it is logged, and ``serve.advertise`` replaces it. Sources:
NetworkUtil.getLocalAddress, BrokerConfig.brokerIP1.
"""

import ipaddress
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rocketmq_tiered.server.security.audit import AuditEvents
from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.security.rules import rules_in_file
from rocketmq_tiered.server.wire.connection_limits import ConnectionLimits
from rocketmq_tiered.server.wire.listener import ServerOptions
from rocketmq_tiered.server.wire.request import Peer
from tiered.errors import UsageError
from tiered.model.address import host_and_port
from tiered.private_directory import check_trusted_file
from tiered.reloaded_files import ReloadedFiles
from tiered.remoting.tls import password_in
from tiered.settings.sections import ServeSettings


class MemoryShares:
    """Bytes of each share of ``memory_bytes``."""

    def __init__(self, memory_bytes: int) -> None:
        """Divide ``serve.memory_bytes``; the shares add up to all of it."""
        tenth = memory_bytes // 10
        self.large_requests = memory_bytes * 4 // 10
        """Requests of 16 KiB and more in progress; above it the oldest clients are closed."""
        self.partial_frames = tenth
        """Incomplete frames; above it the oldest clients are closed."""
        self.unread_replies = tenth
        """Replies that clients have not read; above it the oldest clients are closed."""
        self.clients = tenth
        """Groups, members and subscriptions named by heartbeats; above it new ones are refused."""
        self.offsets = tenth
        """Group offsets committed here; above it new groups and queues are refused."""
        self.popped = tenth
        """Popped messages without acknowledgement; above it no message is popped."""
        self.retries = tenth
        """Retry messages and dead letters; above it send-back requests are refused."""


def server_options(
    settings: ServeSettings,
    is_member: Callable[[str, Peer], bool] = lambda *_: True,
    *,
    keeps_bodies: bool = False,
) -> ServerOptions:
    """Return the options of the port that ``settings`` describe; the certificate and the access rules are read. Raises
    UsageError with the setting that is wrong. ``is_member``: whether the client at a connection is in a consumer group;
    ``keeps_bodies``: the authorizer leaves parsed bodies to the handlers."""
    for key, complaint in settings.complaints():
        raise UsageError(f"{key}: the settings of serve contradict each other", hint=complaint)
    host, port = parse_address(settings.bind, "serve.bind")
    events = AuditEvents(is_member)
    rules = rules_in_file(Path(settings.acl_file), events.reloaded) if settings.acl_file else None
    return ServerOptions(
        host=host,
        port=port,
        connections_max=settings.connections_max,
        address_max=settings.connections_per_address_max,
        limits=connection_limits(settings),
        tls=kept_tls(settings, events.reloaded),
        tls_only=settings.tls_only,
        proxy_from=settings.proxy_networks(),
        authorizer=RulesAuthorizer(
            rules, settings.audit_interval_ms / 1000, events=events, keeps_bodies=keeps_bodies
        ),
    )


def connection_limits(settings: ServeSettings) -> ConnectionLimits:
    """Return the limits of memory that ``serve.memory_bytes`` sets for all connections together."""
    memory = MemoryShares(settings.memory_bytes)
    return ConnectionLimits(
        unread_bytes_max=memory.unread_replies,
        partial_bytes_max=memory.partial_frames,
        large_bytes_max=memory.large_requests,
    )


def parse_address(text: str, key: str) -> tuple[str, int]:
    """Host and port of ``host:port``. Raises UsageError naming the setting ``key``."""
    found = host_and_port(text)
    if found is None:
        raise UsageError(f"{key} = {text} is not host:port", hint="write for example 0.0.0.0:9876")
    return found


def kept_tls(
    settings: ServeSettings, on_reload: Callable[[bool], None] = lambda _: None
) -> Callable[[], ssl.SSLContext | None] | None:
    """Return a function that returns the present TLS context: the files are loaded again after one was renewed, and
    ``on_reload`` is called with the success. None: the port has no TLS. Raises UsageError if a file does not load
    now."""
    paths = (
        settings.tls_certificate,
        settings.tls_key,
        settings.tls_key_password_file,
        settings.tls_client_ca,
    )
    kept = ReloadedFiles(paths, lambda: tls_context(settings), "certificates for clients", on_reload)
    return kept.now if settings.tls_certificate else None


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """Return the TLS context of the port with certificate, key and clients' CA of ``settings``; None without a
    certificate. Raises UsageError if a file cannot be read or does not load."""
    if not settings.tls_certificate:
        return None
    password = password_in(settings.tls_key_password_file, "serve.tls_key_password_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        check_trusted_file(Path(settings.tls_key or settings.tls_certificate), "serve.tls_key")
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None, password=password)
        if settings.tls_client_ca:
            check_trusted_file(Path(settings.tls_client_ca), "serve.tls_client_ca", is_secret=False)
            context.load_verify_locations(settings.tls_client_ca)
            is_required = settings.tls_client_required
            context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"one of serve.tls_certificate, serve.tls_key and serve.tls_client_ca cannot be loaded: {error}"
        ) from error
    return context


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
    """Return whether only clients on this machine can reach ``host``, an address or "localhost"."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    # ::ffff:127.0.0.1 is an IPv4 address in IPv6 form.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def check_advertised(advertise: str, section: str) -> None:
    """Raise UsageError if ``advertise``, the setting of that name in ``section``, is an address that no client can
    dial: a wildcard such as 0.0.0.0 is only one to listen on."""
    key = f"{section}.advertise"
    if is_wildcard(parse_address(advertise, key)[0]):
        raise UsageError(
            f"{key} = {advertise} is not an address that clients can dial",
            hint=f"set {key} to this host as clients see it; {section}.bind is the address to listen on",
        )


def outgoing_address(family: int) -> str | None:
    """Return this machine's IPv4 or IPv6 address (``family``: AF_INET or AF_INET6) from which packets to other hosts
    leave; None if none can leave."""
    try:
        # No packet is sent: connect of a datagram socket only chooses the route.
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
    """Return the host that clients dial for a port on ``bound_host``: this one, or for a wildcard an address of this
    machine, which ``own`` returns by address family. Raises UsageError, with ``setting`` to set instead, if there is
    none."""
    if not is_wildcard(bound_host):
        return bound_host
    families = [socket.AF_INET] if "." in bound_host else [socket.AF_INET, socket.AF_INET6]
    dialled = next((host for family in families if (host := own(family)) is not None), None)
    if dialled is None:
        raise UsageError(
            f"the address that clients dial is not known: {bound_host} stands for all addresses of this machine,"
            " and none of them reaches other hosts",
            hint=f"set {setting} (--advertise HOST:PORT) to this host as clients see it",
        )
    return dialled

"""``host:port`` addresses of settings and brokers."""

_PORT_MAX = 65_535
_DIGITS_MAX = 5


def host_and_port(text: str) -> tuple[str, int] | None:
    """The host, without brackets, and the port; None for other text."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isascii() or not port.isdecimal() or len(port) > _DIGITS_MAX:
        return None
    return (host, int(port)) if int(port) <= _PORT_MAX else None

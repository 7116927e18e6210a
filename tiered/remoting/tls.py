"""TLS of the connections that we open, to brokers and name servers: what it needs, and what its failures mean.

Owns what the context is made of, and words for what goes wrong. Does not own connecting
(client.py, server/proxy/upstream.py). Server certificates are loaded in server/listen.
Sources: TlsHelper, TlsSystemConfig, NettyRemotingServer (who gets a first byte that it does not take hangs up).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiered.errors import UsageError
from tiered.remoting.tls_context_cache import KeptContext

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)

FULL, CA, NONE = "full", "ca", "none"
"""What is checked of a certificate: who signed it, its time and the host; not the host; nothing."""
TLS_WANTED = "one that takes TLS only (tls.server.mode=enforcing) does so: broker.tls = true dials with TLS"
"""Why a connection without TLS may have been closed before anything came."""
PASSWORD_CHARS_MAX = 1024
_EXPIRED, _NOT_YET, _OTHER_HOST, _OTHER_ADDRESS = 10, 9, 62, 64
_UNKNOWN_SIGNERS = frozenset({2, 18, 19, 20, 21, 24})
"""X509_V_ERR_* of OpenSSL."""
_NOT_TLS = (
    "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "BAD_RECORD_TYPE",
    "PACKET_LENGTH_TOO_LONG", "BAD_LENGTH",
)  # fmt: skip
_TOO_OLD = ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL")


@dataclass(frozen=True)
class TlsOptions:
    """``verify``: FULL, CA or NONE. The others are paths of PEM files, empty for none; ``ca`` empty: the system's.
    ``key_password``: path of a file that holds the password of the key, empty where it has none."""

    verify: str = FULL
    ca: str = ""
    certificate: str = ""
    key: str = ""
    key_password: str = ""


@dataclass(frozen=True)
class TlsFailure:
    """Why a connection failed, said of the other side as "it". ``is_lasting``: to try again alone will not help."""

    words: str
    hint: str = ""
    is_lasting: bool = True

    def __str__(self) -> str:
        return f"{self.words}; {self.hint}" if self.hint else self.words


class ClientTls:
    """What new connections use. Raises UsageError for files that do not load; later ones that do not are reported, and
    the old ones stay. Not thread-safe."""

    def __init__(self, options: TlsOptions) -> None:
        self.options = options
        paths = options.ca, options.certificate, options.key, options.key_password
        self._kept = KeptContext(paths, lambda: _loaded(options), "the broker")
        self.context = self._kept.now
        """For the connection that is made now."""
        self._told: dict[str, str] = {}

    def explained(self, error: BaseException, host: str) -> TlsFailure | None:
        """What ``error`` of a connection to ``host``, while it was made or before anything came, means; None where it
        has nothing to do with TLS."""
        return explained(error, self.options, host)

    def failed(self, address: str, failure: TlsFailure) -> None:
        """Say in the log that ``address`` cannot be used, once until it can or something else is wrong."""
        if self._told.get(address) != str(failure):
            self._told[address] = str(failure)
            logger.warning("a connection with TLS fails", extra={"address": address, "cause": str(failure)})

    def succeeded(self, address: str) -> None:
        """``address`` answers."""
        if self._told.pop(address, None) is not None:
            logger.info("a connection with TLS works again", extra={"address": address})


def explained(error: BaseException, options: TlsOptions, host: str) -> TlsFailure | None:
    """See ClientTls."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrusted(error, options, host)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionResetError | BrokenPipeError):
        return closed(options)
    if isinstance(error, ssl.SSLError):
        return _refused(error.reason or str(error), options)
    return None


def closed(options: TlsOptions) -> TlsFailure:
    """It hung up before it said anything."""
    ours = (
        f"does not accept the certificate in {options.certificate}"
        if options.certificate
        else "wants a certificate of ours (broker.tls_certificate)"
    )
    return TlsFailure(
        "it closed the connection",
        f"one that takes no TLS (tls.server.mode=disabled) does so, or that {ours}",
        is_lasting=False,
    )


def _distrusted(error: ssl.SSLCertVerificationError, options: TlsOptions, host: str) -> TlsFailure:
    code = error.verify_code
    if code == _EXPIRED:
        return TlsFailure("its certificate, or that of its CA, has expired", "renew it there")
    if code == _NOT_YET:
        return TlsFailure("its certificate is not valid yet", "compare the clocks")
    if code in (_OTHER_HOST, _OTHER_ADDRESS):
        return TlsFailure(
            f"its certificate is not for {host}", 'broker.tls_verify = "ca" does not look at the name'
        )
    if code in _UNKNOWN_SIGNERS:
        signers = f"a CA in {options.ca}" if options.ca else "a CA that this system trusts"
        return TlsFailure(
            f"its certificate is not signed by {signers}",
            "name its CA, or the certificate itself, in broker.tls_ca",
        )
    return TlsFailure(f"its certificate is not accepted: {error.verify_message}", "see broker.tls_ca")


def _refused(reason: str, options: TlsOptions) -> TlsFailure:
    if any(word in reason for word in _TOO_OLD):
        return TlsFailure("it offers no TLS 1.2 or later", "update its Java")
    if "ALERT" in reason and options.certificate:
        return TlsFailure(
            f"it does not accept the certificate in {options.certificate} ({reason})",
            "is it signed by a CA that it trusts, and still valid?",
        )
    if "ALERT" in reason and "CERTIFICATE" in reason:
        return TlsFailure("it wants a certificate of ours", "name one in broker.tls_certificate")
    if "ALERT" in reason:
        return TlsFailure(
            f"it refuses ({reason})", "it may want a certificate of ours: broker.tls_certificate"
        )
    if any(word in reason for word in _NOT_TLS):
        return TlsFailure("it does not speak TLS", "is it the right port, and broker.tls meant?")
    return TlsFailure(f"TLS fails: {reason}")


def _loaded(options: TlsOptions) -> ssl.SSLContext:
    import ssl  # 0.005 s that most commands do not need

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = options.verify == FULL
    if options.verify == NONE:
        context.verify_mode = ssl.CERT_NONE
    else:
        # A server's own certificate may stand for its CA: those of a RocketMQ server are often made for it alone.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _trust(context, options.ca)
    if options.certificate:
        _show(context, options)
    return context


def _trust(context: ssl.SSLContext, ca: str) -> None:
    if not ca:
        context.load_default_certs()
        return
    try:
        context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"broker.tls_ca = {ca!r} does not load: {_why(error)}", hint="name a PEM file"
        ) from error


def _show(context: ssl.SSLContext, options: TlsOptions) -> None:
    password = password_in(options.key_password, "broker.tls_key_password_file")
    try:
        context.load_cert_chain(options.certificate, options.key or None, password=password)
    except OSError as error:
        files = f"broker.tls_certificate = {options.certificate!r}"
        if options.key:
            files += f" with broker.tls_key = {options.key!r}"
        raise UsageError(
            f"{files} does not load: {_why(error)}",
            hint="name PEM files; where the key is encrypted, its password in broker.tls_key_password_file",
        ) from error


def password_in(path: str, setting: str) -> str:
    """The password of a private key: the first line of the file; empty without one, which no encrypted key has and
    without which the library would ask for it at the terminal. Raises UsageError naming ``setting``."""
    if not path:
        return ""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.readline(PASSWORD_CHARS_MAX).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{setting} = {path!r} cannot be read: {why}") from error


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)

"""TLS of client connections to brokers and name servers: the context, and the meaning of failures.

Connections are made in client.py and rocketmq_tiered/server/proxy/upstream.py; rocketmq_tiered/server/listen loads
server certificates.

Sources: TlsHelper, TlsSystemConfig, NettyRemotingServer (closes the connection after an unexpected first byte).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiered.errors import UsageError
from tiered.private_directory import check_trusted_file
from tiered.reloaded_files import ReloadedFiles

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)

FULL, CA, NONE = "full", "ca", "none"
"""Certificate checks: chain, validity and host; not the host; none."""
TLS_WANTED = "the broker may require TLS (tls.server.mode=enforcing): set broker.tls = true"
"""Hint for a plain connection that was closed before any response."""
PASSWORD_CHARS_MAX = 1024
_EXPIRED, _NOT_YET, _OTHER_HOST, _OTHER_ADDRESS = 10, 9, 62, 64
_UNKNOWN_SIGNERS = frozenset({2, 18, 19, 20, 21, 24})
"""X509_V_ERR_* of OpenSSL."""
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "UNKNOWN_PROTOCOL",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "BAD_RECORD_TYPE",
    "PACKET_LENGTH_TOO_LONG",
    "BAD_LENGTH",
)
_TOO_OLD = ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL")


@dataclass(frozen=True)
class TlsOptions:
    """``verify``: FULL, CA or NONE. The others are paths of PEM files, empty for none; ``ca`` empty: the system's.
    ``key_password``: path of a file with the key's password, empty for none."""

    verify: str = FULL
    ca: str = ""
    certificate: str = ""
    key: str = ""
    key_password: str = ""


@dataclass(frozen=True)
class TlsFailure:
    """Why a connection failed. ``is_lasting``: retrying will not help."""

    words: str
    hint: str = ""
    is_lasting: bool = True

    def __str__(self) -> str:
        return f"{self.words}; {self.hint}" if self.hint else self.words


class ClientTls:
    """TLS of new connections. Raises UsageError for files that do not load; if changed files do not load, this is
    logged and the old ones stay in use. Not thread-safe."""

    def __init__(self, options: TlsOptions) -> None:
        self.options = options
        paths = options.ca, options.certificate, options.key, options.key_password
        self.context = ReloadedFiles(
            paths, lambda: _load_context(options), "TLS files for connections to brokers"
        ).now
        """The current context."""
        self._logged: dict[str, str] = {}

    def explain(self, error: BaseException, host: str) -> TlsFailure | None:
        """What is wrong with TLS if ``error`` ended a connection to ``host`` during the handshake or before any
        response; None if the error is not about TLS."""
        return explained(error, self.options, host)

    def note_failure(self, address: str, failure: TlsFailure) -> None:
        """Log why a connection to ``address`` failed, unless the same was logged and no connection has worked since."""
        if self._logged.get(address) != str(failure):
            self._logged[address] = str(failure)
            logger.warning(
                "a TLS connection to %s failed: %s",
                address,
                failure,
            )

    def note_success(self, address: str) -> None:
        """Log that ``address`` has responded, if a failure of it was logged."""
        if self._logged.pop(address, None) is not None:
            logger.info("TLS connections to %s work again", address)


def explained(error: BaseException, options: TlsOptions, host: str) -> TlsFailure | None:
    """What is wrong with TLS, and what to do, if ``error`` ended a new connection to ``host`` that was made with
    ``options``; None if the error is not about TLS."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_failure(error, options, host)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionResetError | BrokenPipeError):
        return closed(options)
    if isinstance(error, ssl.SSLError):
        return _handshake_failure(error.reason or str(error), options)
    return None


def closed(options: TlsOptions) -> TlsFailure:
    """The failure of a connection that the peer closed before any response: it may not support TLS, or refuse or miss
    the certificate of this side."""
    ours = (
        f"rejects the certificate in {options.certificate}"
        if options.certificate
        else "requires a client certificate (broker.tls_certificate)"
    )
    return TlsFailure(
        "the peer closed the connection before it answered",
        f"the peer may not support TLS (tls.server.mode=disabled), or it {ours}",
        is_lasting=False,
    )


def _certificate_failure(error: ssl.SSLCertVerificationError, options: TlsOptions, host: str) -> TlsFailure:
    """Why the server's certificate is not accepted, by the code of OpenSSL in ``error``, and what to do."""
    code = error.verify_code
    if code == _EXPIRED:
        return TlsFailure("the server's certificate, or that of its CA, has expired", "renew the certificate")
    if code == _NOT_YET:
        return TlsFailure("the server's certificate is not valid yet", "compare the clocks of both hosts")
    if code in (_OTHER_HOST, _OTHER_ADDRESS):
        return TlsFailure(
            f"the server's certificate is not for {host}", 'to ignore the name, set broker.tls_verify = "ca"'
        )
    if code in _UNKNOWN_SIGNERS:
        signers = f"a CA in {options.ca}" if options.ca else "a CA of this system"
        return TlsFailure(
            f"the server's certificate is not signed by {signers}",
            "add its CA, or the certificate itself, to the file in broker.tls_ca",
        )
    return TlsFailure(f"the server's certificate is invalid: {error.verify_message}", "check broker.tls_ca")


def _handshake_failure(reason: str, options: TlsOptions) -> TlsFailure:
    """Why a TLS handshake failed, and what to do, by OpenSSL's ``reason``: it names the alert that the server sent, or
    tells that the server's bytes were no TLS."""
    if any(word in reason for word in _TOO_OLD):
        return TlsFailure("the server does not support TLS 1.2", "update the server's Java")
    if "ALERT" in reason and options.certificate:
        return TlsFailure(
            f"the server rejects the certificate in {options.certificate} ({reason})",
            "check that the certificate is valid and signed by a CA that the server trusts",
        )
    if "ALERT" in reason and "CERTIFICATE" in reason:
        return TlsFailure("the server requires a client certificate", "set broker.tls_certificate")
    if "ALERT" in reason:
        return TlsFailure(
            f"the server refuses the connection ({reason})",
            "the server may require a client certificate: set broker.tls_certificate",
        )
    if any(word in reason for word in _NOT_TLS):
        return TlsFailure("the server does not support TLS", "check the port and broker.tls")
    return TlsFailure(f"the TLS handshake fails: {reason}")


def _load_context(options: TlsOptions) -> ssl.SSLContext:
    """A TLS context for connections to brokers and name servers, from the files that ``options`` name. Raises
    UsageError for files that do not load."""
    import ssl  # import takes 0.005 s

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = options.verify == FULL
    if options.verify == NONE:
        context.verify_mode = ssl.CERT_NONE
    else:
        # A server certificate may be trusted without its CA, as many of RocketMQ servers are self-signed.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _trust(context, options.ca)
    if options.certificate:
        _load_certificate(context, options)
    return context


def _trust(context: ssl.SSLContext, ca: str) -> None:
    """Trust the CA and server certificates in the file ``ca``, or those of the system if it is empty. Raises UsageError
    for a file that does not load."""
    if not ca:
        context.load_default_certs()
        return
    try:
        check_trusted_file(Path(ca), "broker.tls_ca", is_secret=False)
        context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"broker.tls_ca = {ca} cannot be loaded: {_why(error)}", hint="use a file in PEM format"
        ) from error


def _load_certificate(context: ssl.SSLContext, options: TlsOptions) -> None:
    """Load the client certificate, which servers may require, with its key. Raises UsageError for files that do not
    load."""
    password = password_in(options.key_password, "broker.tls_key_password_file")
    try:
        check_trusted_file(Path(options.key or options.certificate), "broker.tls_key")
        context.load_cert_chain(options.certificate, options.key or None, password=password)
    except OSError as error:
        files = f"broker.tls_certificate = {options.certificate}"
        if options.key:
            files += f" with broker.tls_key = {options.key}"
        raise UsageError(
            f"{files} cannot be loaded: {_why(error)}",
            hint="use files in PEM format; if the key is encrypted, set broker.tls_key_password_file",
        ) from error


def password_in(path: str, setting: str) -> str:
    """The password of a private key: the first line of the file; empty without a file, as the library would prompt for
    a password at the terminal. Raises UsageError naming ``setting``."""
    if not path:
        return ""
    try:
        check_trusted_file(Path(path), setting)
        with Path(path).open(encoding="utf-8") as file:
            return file.readline(PASSWORD_CHARS_MAX).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{setting} = {path} cannot be read: {why}") from error


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)

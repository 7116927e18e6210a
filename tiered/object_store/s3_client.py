"""Sets up the SDK's clients: credentials, addressing, signing, no retries, our transport.

Path-style addressing for custom endpoints, the SDK's choice for AWS. The requests are in s3.py and s3_async.py.
``connect`` loads the SDK, not the import.
"""

import base64
import hashlib
import logging
from dataclasses import replace
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from tiered.object_store.interface import StoreOptions
from tiered.object_store.s3_transport import CONNECTIONS_MAX, S3Transport
from tiered.settings.sections import ObjectStoreSettings

_FROM_FILES = frozenset({"shared-credentials-file", "config-file"})
"""Credential providers of the SDK whose keys may be replaced by others."""


def with_endpoint(options: StoreOptions, session: Any) -> StoreOptions:
    """``options`` with the S3 endpoint that the environment or the AWS SDK's configuration file names, if the settings
    name none: how requests are signed and addressed depends on it. ``session``: the SDK's."""
    from botocore.configprovider import ConfiguredEndpointProvider

    if options.settings.endpoint_url or session.get_config_variable("ignore_configured_endpoint_urls"):
        return options
    provider = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3")
    return replace(options, settings=replace(options.settings, endpoint_url=provider.provide() or ""))


def configured(options: StoreOptions) -> StoreOptions:
    """``with_endpoint`` of the SDK's own session, for a client that is not the SDK's."""
    from botocore.session import get_session

    return with_endpoint(options, get_session())


def ca_bundle() -> str | None:
    """The file of CA certificates of the SDK's environment or profile."""
    from botocore.session import get_session

    found: str | None = get_session().get_config_variable("ca_bundle")
    return found


def proxy_of(endpoint_url: str) -> str | None:
    """The proxy through which requests to ``endpoint_url`` go, by the environment."""
    from botocore.utils import get_environ_proxies

    found: str | None = get_environ_proxies(endpoint_url).get(urlsplit(endpoint_url).scheme)
    return found


def client_arguments(options: StoreOptions) -> dict[str, Any]:
    """The arguments for the SDK's clients, blocking and asynchronous, except for Config: endpoint, region, and access
    keys if the options have some."""
    settings, credentials = options.settings, options.credentials
    arguments: dict[str, Any] = {
        "endpoint_url": settings.endpoint_url or None,
        "region_name": settings.region or None,
    }
    if credentials is not None:
        arguments |= {
            "aws_access_key_id": credentials.access_key,
            "aws_secret_access_key": credentials.secret_key,
            "aws_session_token": credentials.session_token,
        }
    return arguments


def encryption_of(settings: ObjectStoreSettings) -> dict[str, str]:
    """Arguments of requests that create an object."""
    if not settings.server_side_encryption:
        return {}
    key = {"SSEKMSKeyId": settings.kms_key} if settings.kms_key else {}
    return {"ServerSideEncryption": settings.server_side_encryption} | key


def config_arguments(settings: ObjectStoreSettings) -> dict[str, Any]:
    """The arguments for the SDK's Config: timeouts, one attempt for each call, no checksums by the SDK, where the
    bucket's name goes, and whether bodies are signed."""
    style = settings.addressing_style
    if style == "auto" and settings.endpoint_url:
        style = "path"  # custom endpoints seldom have wildcard DNS names
    is_plain = settings.endpoint_url.startswith("http://")
    unsigned = settings.trusted_network or not is_plain or _is_this_machine(settings.endpoint_url)
    return {
        "connect_timeout": settings.connect_timeout_ms / 1000,
        "read_timeout": settings.read_timeout_ms / 1000,
        "max_pool_connections": CONNECTIONS_MAX,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": style, "payload_signing_enabled": not unsigned},
    }


def _is_this_machine(endpoint_url: str) -> bool:
    """Whether the endpoint is on this machine, so that bodies need no signature on their way there."""
    host = urlsplit(endpoint_url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def add_content_md5(params: dict[str, Any], **_event: Any) -> None:
    """Add Content-MD5 to DeleteObjects: the SDK sends only a CRC32, which stores older than 2025 do not accept."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode("ascii")


def has_outdated_keys(client: Any) -> bool:
    """Whether the access keys of ``client`` are from a file that now contains other keys: the SDK reads such a file
    only once. It renews keys that expire itself."""
    import boto3  # loaded already: there is a client

    used = client._request_signer._credentials
    if used is None or used.method not in _FROM_FILES:
        return False
    present = boto3.session.Session().get_credentials()
    return present is not None and _keys(present) != _keys(used)


def _keys(credentials: Any) -> tuple[str, str, str | None]:
    return credentials.access_key, credentials.secret_key, credentials.token


def quiet_sdk_logs() -> None:
    """Disable the SDK's debug logs, which contain whole requests, including session tokens."""
    for name in ("botocore", "boto3", "aiobotocore", "aioboto3"):
        sdk_logger = logging.getLogger(name)
        sdk_logger.setLevel(max(sdk_logger.level, logging.INFO))


def connect(options: StoreOptions) -> tuple[Any, S3Transport]:
    """A boto3 client for S3 and the S3Transport through which its requests go. Makes no request itself."""
    import boto3  # import takes 0.4 s, and file:// archives do not need it
    from botocore.config import Config
    from botocore.httpsession import get_cert_path

    quiet_sdk_logs()
    session = boto3.session.Session()
    options = with_endpoint(options, session._session)
    settings = options.settings
    client = session.client("s3", config=Config(**config_arguments(settings)), **client_arguments(options))
    transport = S3Transport(
        settings.connect_timeout_ms / 1000,
        settings.read_timeout_ms / 1000,
        ca_bundle() or get_cert_path(True),
        proxy_of(client.meta.endpoint_url),
    )
    client.meta.events.register("before-send.s3", transport)
    client.meta.events.register("before-call.s3.DeleteObjects", add_content_md5)
    return client, transport

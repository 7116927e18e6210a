"""Bodies are signed where they could be changed on the way: plain http to another machine."""

from pathlib import Path
from typing import Any

import pytest

from tiered.object_store.interface import S3Credentials, StoreOptions
from tiered.object_store.s3_client import config_arguments, connect
from tiered.settings.sections import ObjectStoreSettings


@pytest.mark.parametrize(
    ("endpoint_url", "trusted", "signed"),
    [
        ("http://minio:9000", False, True),
        ("http://10.0.0.7:9000", False, True),
        ("http://127.0.0.1.example.org:9000", False, True),
        ("http://minio:9000", True, False),
        ("http://127.0.0.1:9000", False, False),
        ("http://[::1]:9000", False, False),
        ("http://localhost:9000", False, False),
        ("https://minio:9000", False, False),
        ("", False, False),
    ],
)
def test_bodies_are_signed_where_the_network_could_change_them(
    endpoint_url: str, trusted: bool, signed: bool
) -> None:
    settings = ObjectStoreSettings(endpoint_url=endpoint_url, trusted_network=trusted)
    assert config_arguments(settings)["s3"]["payload_signing_enabled"] is signed


@pytest.mark.parametrize("ignored", ["false", "true"])
def test_an_endpoint_of_the_sdks_own_configuration_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ignored: str
) -> None:
    """Named in the environment or in the SDK's file, it is as good an endpoint as one of the settings."""
    config = tmp_path / "config"
    config.write_text(
        "[default]\nservices = own\n[services own]\ns3 =\n  endpoint_url = http://minio.example:9000\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", ignored)
    options = StoreOptions(ObjectStoreSettings(region="us-east-1"), S3Credentials("a", "b"))
    client, transport = connect(options)
    seen: list[tuple[str, bytes]] = []

    def keep(request: Any, **_event: Any) -> None:
        seen.append((request.url, request.headers["X-Amz-Content-SHA256"]))
        raise InterruptedError

    client.meta.events.unregister("before-send.s3", transport)
    client.meta.events.register("before-send.s3", keep)
    with pytest.raises(InterruptedError):
        client.put_object(Bucket="bucket", Key="k", Body=b"x")
    ((url, digest),) = seen
    is_configured = ignored == "false"
    assert url == (
        "http://minio.example:9000/bucket/k" if is_configured else "https://bucket.s3.amazonaws.com/k"
    )
    assert (digest != b"UNSIGNED-PAYLOAD") is is_configured

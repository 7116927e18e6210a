"""Bodies are signed where somebody could change them on the way: plain http to another machine."""

from __future__ import annotations

import pytest

from tiered.object_store.s3_client import config_arguments
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

"""Key files, and stores that seal by them; keys of KMS."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest

from tests.servers.proxy import FaultProxy
from tests.servers.running_store import REGION, RunningStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.key_ring import FileKeys
from tiered.object_store.sealed import SealedStore

ARCHIVE = "c/b"
SO = "data/ab/orders/0/1/00000000000000000000-1-{}.so"
SSO = "sets/ab/00000000000000000000-1-{}.sso"


def key_file(path: Path, *names: str, seed: int = 1) -> Path:
    """A ring with a key for each of ``names``: equal names and seeds have equal keys."""
    lines = (
        f"{name} {base64.b64encode(f'{name}{seed}'.encode().ljust(32, b'.')).decode()}\n" for name in names
    )
    path.write_text("".join(lines))
    path.chmod(0o600)
    return path


def sealing(store: ObjectStore, ring: Path | None) -> SealedStore:
    """``store`` as a new process with the key file ``ring`` opens it."""
    return SealedStore(store, None if ring is None else FileKeys(ring))


@contextmanager
def kms_key(server: RunningStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultProxy, str]]:
    """A new key of the server's KMS, and the proxy through which this process and its children reach that."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    with FaultProxy(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", proxy.endpoint)
        yield proxy, boto3.client("kms", region_name=REGION).create_key()["KeyMetadata"]["Arn"]

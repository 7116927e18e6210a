"""The accounts of docker-compose.yml on a MinIO: users with deploy/compose's policies, made by its own script."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.compose_accounts import URL, minio, tiered
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

__all__ = ["minio"]


def test_each_account_does_its_work_and_not_the_others(
    minio: RunningStore, real_store: Callable[[str], Path]
) -> None:
    store = real_store("F")
    backfill = ("backfill", str(store / "store"), URL, "--broker-conf", str(store / "broker.conf"))
    refused = tiered(minio, "gc", *backfill)
    assert refused.returncode == 2 and "s3:PutObject: AccessDenied" in refused.stderr
    done = tiered(minio, "sidecar", *backfill)
    assert done.returncode == 0, done.stderr
    done = tiered(minio, "gc", "gc", URL, "--apply")
    assert done.returncode == 0, done.stderr

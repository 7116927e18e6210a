"""The ground truth through real S3 servers: byte-exact, a second run uploads nothing, verify clean, no leftovers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import STORES, check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.servers.running_store import RunningStore
from tiered.archive.verify import verify_archive
from tiered.formats.keys import archive_prefix
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

pytestmark = [pytest.mark.integration]


def check_through(server: RunningStore, directory: Path, name: str) -> None:
    """Backfill one store into a bucket of its own and compare all of it."""
    root = open_store(f"{server.fresh_bucket()}/archive", server.options())
    backfill(directory / "store", root)
    assert check_against_truth(root, directory, name) > 400
    again = backfill(directory / "store", root)
    assert (again.messages, again.objects, again.commits) == (0, 0, 0)
    report = verify_archive(PrefixedStore(root, archive_prefix(CLUSTER, BROKER)), depth="full")
    assert report.anomalies == []
    assert report.leftovers == []
    root.close()


@pytest.mark.parametrize("name", STORES)
def test_every_store_through_minio(
    name: str, real_store: Callable[[str], Path], minio_url: RunningStore
) -> None:
    check_through(minio_url, real_store(name), name)


@pytest.mark.parametrize("name", STORES)
def test_every_store_through_localstack(
    name: str, real_store: Callable[[str], Path], localstack_url: RunningStore
) -> None:
    check_through(localstack_url, real_store(name), name)

"""Archives to query: one of a real broker's store, and a small one that tests write."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_tiered.cli import main
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.spark.conftest import spark  # noqa: F401 - a fixture
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

STORED_MS = 1_795_219_200_000
"""2026-11-21 00:00 UTC."""


@pytest.fixture(scope="session")
def archive_k(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The archive of store K: LMQs, BatchCQ, IPv6 hosts, compressed bodies, tags, properties."""
    url = f"file://{tmp_path_factory.mktemp('archive-k')}"
    store = real_store("K") / "store"
    assert main(["backfill", str(store), url, "--cluster", "c", "--broker", "b", "--json"]) == 0
    return url


@pytest.fixture(scope="session")
def orders(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Topic orders: 200 messages of 2 queues, one a minute; topics pay-ments and payments: 4 messages."""
    return write_orders(tmp_path_factory.mktemp("orders"))


def write_orders(root: Path) -> str:
    """The URL of that archive, made at ``root``."""
    builder = ArchiveBuilder(PrefixedStore(FileStore(root), "cluster/broker"))
    for part in range(4):
        builder.commit(
            [
                Sent(
                    QueueKey("orders", number % 2, 0),
                    b'{"id": %d, "amount": %d}' % (number, number % 10),
                    tags=f"t{number % 3}",
                    keys=[f"k{number}"],
                    stored_ms=STORED_MS + number * 60_000,
                )
                for number in range(part * 50, part * 50 + 50)
            ]
        )
    bodies = b'{"id": 7}', b"no json \xff", b""
    builder.commit([Sent(QueueKey("pay-ments", 0, 0), body, stored_ms=STORED_MS) for body in bodies])
    builder.commit([Sent(QueueKey("payments", 0, 0), b'{"order": 9}', stored_ms=STORED_MS)])
    return f"file://{root}"

"""One small local Spark session for all tests of a process, and archives of real stores to read with it."""

import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.spark import session
from tests.end_to_end.offloading import CLUSTER, FILTER, SMALL
from tiered.broker_store.store import open_broker_store
from tiered.object_store.file import FileStore
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity

STORES = ["A", "B", "C", "D", "E", "F", "G", "H", "H2", "K"]
LOCAL = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A session is a server: its JVM starts for longer than all other tests of Spark take."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("integration")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with the data source registered. Tests of one xdist group share it."""
    work = tmp_path_factory.mktemp("spark")
    places = {"spark.local.dir": str(work / "local"), "spark.sql.warehouse.dir": str(work / "warehouse")}
    started = session("tests", **(LOCAL | places))
    yield started
    started.stop()


def archive_store(store: Path, archive: Path, broker: str) -> None:
    """Archive a broker's store directory as that of ``broker``."""
    with open_broker_store(store) as broker_store:
        identity = OffloadIdentity(CLUSTER, broker, "test", "backfill")
        offloader = Offloader(
            broker_store, FileStore(archive), identity, SMALL, topic_filter=FILTER, offsets_source=no_offsets
        )
        offloader.run(threading.Event(), follow=False)


@pytest.fixture(scope="session")
def all_archives(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory with the archives of all real stores; the broker of each is named after its store."""
    root = tmp_path_factory.mktemp("archives")
    for name in STORES:
        archive_store(real_store(name) / "store", root, name)
    return root


@pytest.fixture(scope="session")
def archive_of(
    real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The archive of one real store, made when it is first wanted; the broker is named after the store."""

    @cache
    def made(name: str) -> Path:
        root = tmp_path_factory.mktemp(f"archive-{name}-")
        archive_store(real_store(name) / "store", root, name)
        return root

    return made


@pytest.fixture(scope="session")
def small_archive(archive_of: Callable[[str], Path]) -> Path:
    """The archive of store K: LMQs, BatchCQ, IPv6 hosts, compressed bodies."""
    return archive_of("K")

"""Archives a real store as `tiered backfill` does, in this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import IndexSettings, OffloadSettings
from tiered.settings.topic_rules import TopicRules
from uploader.bound_source import no_offsets
from uploader.log_rule import LogLimits
from uploader.offload import Environment, ObjectOptions, Offloader, OffloadIdentity, OffloadResult
from uploader.offload_status import OffloadStatus

CLUSTER, BROKER = "FxCluster", "fx-a"
FILTER = TopicFilter(cluster=CLUSTER, broker=BROKER)
SMALL = OffloadSettings(batch_bytes=1 << 20, split_bytes=256 << 10, block_bytes=64 << 10, root_every=4)
"""Small cycles, so that a store of some megabytes makes many commits, stream objects and root pages."""


def backfill(
    store: Path,
    archive: ObjectStore,
    *,
    settings: OffloadSettings = SMALL,
    topic_filter: TopicFilter = FILTER,
    instance: str = "test",
    index_settings: IndexSettings | None = None,
    replace_log: bool = False,
    same_broker: bool = False,
    conf: BrokerConf | None = None,
    environment: Environment | None = None,
    rules: TopicRules | None = None,
) -> OffloadResult:
    """Offload everything and stop."""
    with open_broker_store(store, conf=conf) as broker_store:
        offloader = Offloader(
            broker_store,
            archive,
            OffloadIdentity(CLUSTER, BROKER, instance, "backfill"),
            settings,
            topic_filter=topic_filter,
            offsets_source=no_offsets,
            log_limits=LogLimits(replace_log, same_broker=same_broker),
            environment=environment,
            options=ObjectOptions(index_settings or IndexSettings(), rules or TopicRules()),
        )
        return offloader.run(threading.Event(), follow=False)


def archive_of(root: ObjectStore) -> PrefixedStore:
    """The archive that ``backfill`` fills."""
    return PrefixedStore(root, archive_prefix(CLUSTER, BROKER))


def state_of(root: ObjectStore) -> CatalogState:
    """Its newest state."""
    return load(archive_of(root))


@contextmanager
def following(
    offloader: Offloader, timeout_s: float = 60.0
) -> Iterator[Callable[[Callable[[OffloadStatus], object]], OffloadStatus | None]]:
    """``offloader`` follows its log. Gives a function that waits for a status as wanted, and returns the last one."""
    stop = threading.Event()
    thread = threading.Thread(target=offloader.run, args=(stop,), kwargs={"follow": True})
    thread.start()

    def reached(wanted: Callable[[OffloadStatus], object]) -> OffloadStatus | None:
        deadline_s = time.monotonic() + timeout_s
        while (status := offloader.status()) is None or not wanted(status):
            if time.monotonic() > deadline_s or not thread.is_alive():
                break
            time.sleep(0.01)
        return status

    try:
        yield reached
    finally:
        stop.set()
        thread.join()

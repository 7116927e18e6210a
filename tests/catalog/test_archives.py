"""Which archives lie under a URL, and which one is meant."""

import pytest

from tests.object_store.fault_store import FaultStore
from tiered.catalog.archives import list_archives, open_archive
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.clock import Clock
from tiered.errors import NotFoundError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore

LONG = "Ü" * 120


def make(store: MemoryStore, cluster: str, broker: str, objects: int = 0) -> None:
    archive = PrefixedStore(store, archive_prefix(cluster, broker))
    CatalogWriter(
        archive, cluster=cluster, broker=broker, instance="i", kind="run", clock=Clock(wall_ms=lambda: 1)
    ).claim()
    for number in range(objects):
        archive.put_if_absent(f"sets/00/{number}", [b""])


def test_all_are_found_without_listing_their_objects() -> None:
    memory = MemoryStore()
    names = [("c", "a"), ("c", "a-1"), ("c", "a.b"), ("c", "a0"), ("d-x", "broker a"), ("d", LONG), ("%", "")]
    for cluster, broker in names:
        make(memory, cluster, broker, objects=50)
    memory.put_if_absent("zz/not/an/archive", [b""])
    memory.put_if_absent("readme.txt", [b""])
    store = FaultStore(memory)
    assert list_archives(store) == sorted(names)
    assert len(store.requests) < 5 * len(names)


def test_names_default_when_unique() -> None:
    memory = MemoryStore()
    make(memory, "c", "a")
    found = open_archive(memory)
    assert (found.cluster, found.broker) == ("c", "a")
    make(memory, "c", "b")
    assert open_archive(memory, broker="b").broker == "b"
    with pytest.raises(
        UsageError, match="2 archives: c/a, c/b; choose one archive with --cluster and --broker"
    ):
        open_archive(memory, cluster="c")


def test_a_missing_archive_is_not_found_and_the_others_are_named() -> None:
    memory = MemoryStore()
    with pytest.raises(NotFoundError, match="holds no archive"):
        open_archive(memory)
    make(memory, "c", "a")
    for cluster, broker in (("c", "x"), (None, "x"), ("x", None)):
        with pytest.raises(NotFoundError, match="it holds c/a"):
            open_archive(memory, cluster, broker)

"""A broker is started on a store during its backfill: what it appends is archived only below its confirm offset."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tests.uploader.halved_log import halved_log
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.offload import Environment, Offloader, OffloadIdentity


def test_a_backfill_takes_nothing_that_a_broker_appends(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    memory = MemoryStore("memory://started")
    with (
        halved_log(real_store("A"), tmp_path / "store") as (broker, end_phys),
        open_broker_store(tmp_path / "store") as store,
        pytest.raises(UnavailableError, match="a broker was started"),
    ):
        Offloader(
            store,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "backfill"),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            environment=Environment(committed=lambda _: broker.start()),
        ).run(threading.Event(), follow=False)
    state = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))
    assert 0 < state.cursor.phys <= end_phys

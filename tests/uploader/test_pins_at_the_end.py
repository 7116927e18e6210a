"""A writer that ends leaves no pin on what is archived: it would stay until the next start."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tiered.broker_store.pins import PinKeeper, PinLimits
from tiered.broker_store.store import open_broker_store
from tiered.object_store.memory import MemoryStore
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity

FILE_BYTES = 4 << 20
"""Of the store's log."""


def test_archived_files_are_let_go(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(real_store("F") / "store", tmp_path / "store")
    stop = threading.Event()
    pins = PinKeeper([tmp_path / "pins"], PinLimits(0.999, 0.9999))
    with open_broker_store(tmp_path / "store", pinned=pins.files) as store:
        offloader = Offloader(
            store,
            MemoryStore("memory://pins-at-the-end"),
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            replace(SMALL, batch_age_ms=100),
            topic_filter=FILTER,
            offsets_source=no_offsets,
            pins=pins,
        )
        thread = threading.Thread(target=offloader.run, args=(stop,), kwargs={"follow": True})
        thread.start()
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            status = offloader.status()
            if (
                status is not None
                and status.pins is not None
                # The first file alone may be read and committed for a moment.
                and FILE_BYTES < status.committed_phys == status.read_phys
            ):
                break
            time.sleep(0.02)
        stop.set()
        thread.join()
        status = offloader.status()
    assert status is not None and status.committed_phys > FILE_BYTES, "more than the first file is archived"
    left = [int(path.name) for path in (tmp_path / "pins").iterdir() if path.name.isdigit()]
    assert all(begin + FILE_BYTES > status.committed_phys for begin in left), left

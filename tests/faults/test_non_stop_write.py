"""NonStopWrite on a real store: whatever PUTs are lost, stalled or refused, the archive is the broker's log."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.end_to_end.test_ground_truth import check_against_truth
from tiered.catalog.garbage import run_gc
from tiered.catalog.protocol import load
from tiered.flat_file.verify import verify_archive
from tiered.formats.keys import archive_prefix
from tiered.object_store.faults import Fault, FaultRule, FaultStore, Request
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import OffloadSettings

PREFIX = archive_prefix(CLUSTER, BROKER)
DATA, SETS, CATALOG = (f"{PREFIX.rstrip('/')}/{part}*" for part in ("data/", "sets/", "catalog/"))
TINY = OffloadSettings(batch_bytes=64 << 10, split_bytes=64 << 10, block_bytes=16 << 10, root_every=8)
LOST = {"LOST_BEFORE", "LOST_AFTER", "STALLED", "THROTTLED"}


def rules(keys: str, probability: float) -> list[FaultRule]:
    """Every kind of fault, one after another, on PUTs of ``keys``."""
    return [FaultRule(Fault[name], keys=keys, probability=probability) for name in sorted(LOST)]


def check_requests(requests: list[Request]) -> int:
    """Faults met. No data key is put twice, and nobody asks about one whose PUT failed."""
    abandoned: set[str] = set()
    put: set[str] = set()
    faults = 0
    for operation, key, outcome in requests:
        faults += outcome in LOST
        if "/catalog/" in key:
            continue
        if operation == "put":
            assert key not in put, f"{key} is put twice"
            put.add(key)
            if outcome != "ok":
                abandoned.add(key)
        else:
            assert key not in abandoned, f"{operation} on abandoned {key}"
            assert operation not in ("list", "delete"), (operation, key)
    return faults


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_lost_puts_change_nothing(seed: int, real_store: Callable[[str], Path]) -> None:
    directory = real_store("F")
    memory = MemoryStore("memory://faults")
    faulty = FaultStore(
        memory,
        [*rules(DATA, 0.12), *rules(SETS, 0.12), *rules(CATALOG, 0.04)],
        seed=seed,
        wait=lambda _: time.sleep(0.002),
    )
    backfill(directory / "store", faulty, settings=TINY)
    assert check_requests(faulty.requests) > 40
    assert {request.outcome for request in faulty.requests} >= LOST
    # Catalog keys count down, so that one LIST finds the head.
    committed = [r.key for r in faulty.requests if r.operation == "put" and "/catalog/" in r.key]
    assert committed == sorted(committed, reverse=True), "commits are made strictly in order"
    assert faulty.land_stalled(), "late arrivals take effect after all was committed"
    assert check_against_truth(memory, directory, "F") > 400

    archive = PrefixedStore(memory, PREFIX)
    report = verify_archive(archive, full=True)
    assert report.anomalies == []
    failed = {r.key for r in faulty.requests if r.operation == "put" and r.outcome in LOST}
    stray = {r for r in failed if "/catalog/" not in r} & {info.key for info in memory.list("")}
    assert stray, "lost after effect leaves objects behind, or this test proves nothing"
    run_gc(archive, load(archive), apply=True, grace_ms=0, clock=archive.clock_ms)
    report = verify_archive(archive, full=True)
    assert (report.anomalies, report.leftovers) == ([], [])
    assert not stray & {info.key for info in memory.list("")}
    assert check_against_truth(memory, directory, "F") > 400

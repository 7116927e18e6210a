"""NonStopWrite on a real store: whatever PUTs are lost, stalled or refused, the archive is the broker's log."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.catalog.collection import run_gc
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.object_store.fault_store import Fault, FaultRule, FaultStore, Request
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import Body
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
    """Count the faults. No data key is put twice, and no request names one whose PUT failed."""
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
            assert operation != "delete", key
            assert operation != "list" or not put, (
                f"{key}: only a new archive is listed, before anything is put"
            )
    return faults


@pytest.mark.integration
@pytest.mark.parametrize("seed", sweep(range(3), fast=[0]))
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
    report = verify_archive(archive, depth="full")
    assert report.anomalies == []
    failed = {r.key for r in faulty.requests if r.operation == "put" and r.outcome in LOST}
    stray = {r for r in failed if "/catalog/" not in r} & {info.key for info in memory.list("")}
    assert stray, "lost after effect leaves objects behind, or this test proves nothing"
    run_gc(archive, load(archive), apply=True, grace_ms=0, clock=archive.clock_ms)
    report = verify_archive(archive, depth="full")
    assert (report.anomalies, report.leftovers) == ([], [])
    assert not stray & {info.key for info in memory.list("")}
    assert check_against_truth(memory, directory, "F") > 400


def test_stalls_of_several_cycles_do_not_add_up(real_store: Callable[[str], Path]) -> None:
    """Both cycles in flight stall twice: each stall of the one lasts until the other stalls too."""
    directory = real_store("F")
    memory = MemoryStore("memory://stalls")
    together = threading.Barrier(2)
    pairs: list[int] = []

    def stall(_: float) -> None:
        pairs.append(together.wait(timeout=10))

    faulty = FaultStore(memory, [FaultRule(Fault.STALLED, keys=SETS, times=4)], wait=stall)
    backfill(directory / "store", faulty, settings=replace(TINY, split_bytes=1 << 30))
    assert sorted(pairs) == [0, 0, 1, 1], "a later cycle's retry does not wait for the older one's commit"
    stalled = [request.key for request in faulty.requests if request.outcome == "STALLED"]
    assert len(set(stalled)) == 4
    assert check_requests(faulty.requests) == 4
    assert verify_archive(PrefixedStore(memory, PREFIX), depth="full").anomalies == []
    assert check_against_truth(memory, directory, "F") > 400


def test_data_is_put_again_while_the_catalog_is_away(real_store: Callable[[str], Path]) -> None:
    """A commit that is not answered holds up no cycle's data."""
    directory = real_store("F")
    memory = MemoryStore("memory://catalog-away")
    retried = threading.Event()

    def stall(_: float) -> None:
        assert retried.wait(timeout=10), "the commit waits until another cycle's data was put again"

    class Watched(FaultStore):
        def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
            super().put_if_absent(key, body, timeout_s=timeout_s)
            if "/sets/" in key and any(r.outcome == "THROTTLED" for r in self.requests):
                retried.set()

    # The claim passes; the first cycle's data too, its commit stalls; then the second cycle is refused once.
    rules_ = [
        FaultRule(Fault.STALLED, keys=CATALOG, skip=1, times=1),
        FaultRule(Fault.THROTTLED, keys=SETS, skip=1, times=1),
    ]
    faulty = Watched(memory, rules_, wait=stall)
    backfill(directory / "store", faulty, settings=replace(TINY, split_bytes=1 << 30))
    assert retried.is_set()
    assert {request.outcome for request in faulty.requests} >= {"STALLED", "THROTTLED"}
    assert check_against_truth(memory, directory, "F") > 400

"""Garbage collection in a large bucket: ``python -m benchmarks.garbage --objects 1000000 --out garbage.jsonl``.

A synthetic history (synthetic_history.py) whose runs have an object each. Most expire in one pass, and are collected.
Expiry and collection are the real ones, each in a process of its own, whose peak memory is the figure. The data objects
exist in listings only. Owns the figures and their limits.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.aging import CountingStore
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.synthetic_history import CYCLE_MS, START_MS, SyntheticHistory
from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from tests.catalog.collection import run_gc
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.formats.keys import SETS_PREFIX, set_key
from tiered.object_store.interface import ObjectInfo
from tiered.settings.topic_rules import TopicRule

PEAK_BYTES_MAX = 256 * MIB
QUEUES, RUNS_OF_A_COMMIT = 10_000, 500
GRACE_MS = 72 * 3_600_000


class _Bucket(CountingStore):
    """Its clock is set, every commit is from the history's beginning, and it lists the data objects of ``before``."""

    now_ms = START_MS
    before: CatalogState | None = None
    deleted = 0

    def clock_ms(self, prefix: str = "") -> int:
        return self.now_ms

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        found = super().list(prefix, start_after=start_after, limit=limit)
        return chain(found, self._data_objects()) if prefix == SETS_PREFIX and self.before else found

    def _data_objects(self) -> Iterator[ObjectInfo]:
        assert self.before is not None
        for page in living_runs(RunIndex(self), self.before):
            chunk = page.chunk
            for place in chunk.objects:
                yield ObjectInfo(chunk.object_keys[int(place["key"])], int(place["size_bytes"]), START_MS)

    def delete(self, keys: Sequence[str]) -> None:
        self.deleted += len(keys)
        for key in keys:
            self._others.pop(key, None)


class _ManyObjects(SyntheticHistory):
    """Every run has an object of its own."""

    def _draft(self) -> CommitDraft:
        draft = super()._draft()
        count = len(draft.runs)
        objects = np.repeat(draft.objects, count)
        objects["key"] = draft.runs["object"] = np.arange(count)
        draft.runs["ordinal"] = 0
        for name in ("rows", "min_phys", "end_phys"):
            objects[name] = draft.runs[name]
        objects["raw_bytes"] = draft.runs["byte_count"]
        objects["size_bytes"] = objects["raw_bytes"] // 3 + 600
        state = self.writer.state
        return CommitDraft(
            draft.kind,
            history=draft.history,
            from_phys=draft.from_phys,
            to_phys=draft.to_phys,
            check=draft.check,
            queues=draft.queues,
            runs=draft.runs,
            objects=objects,
            created_ms=draft.created_ms,
            object_keys=tuple(
                set_key(f"{phys:020d}_{number}", state.epoch, state.version)
                for number, phys in enumerate(draft.runs["min_phys"].tolist())
            ),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.garbage", description=main.__doc__)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--share", type=float, default=0.9, help="how many of them expire")
    parser.add_argument("--out", type=Path, default=Path("garbage.jsonl"))
    parser.add_argument("--step", choices=STEPS, help="one step, in this process")
    parser.add_argument("--directory", type=Path, help="of the history, with --step")
    options = parser.parse_args(arguments)
    if options.step is not None:
        print(json.dumps(STEPS[options.step](options.directory, options.objects, options.share)))
        return 0
    return record(options.out, _measured(options.objects, options.share), _summarize, _table)


def _measured(objects: int, share: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="garbage-") as directory:
        for step in STEPS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.garbage",
                "--step",
                step,
                "--directory",
                directory,
                "--objects",
                str(objects),
                "--share",
                str(share),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            yield {"step": step, **json.loads(done.stdout)}


def _build(directory: Path, objects: int, share: float) -> Row:
    store = _Bucket(directory)
    history = _ManyObjects(store, QUEUES, active=RUNS_OF_A_COMMIT)
    for _ in range(objects // RUNS_OF_A_COMMIT):
        history.cycle()
    store.keep()
    return {"version": history.writer.state.version, **_used()}


def _expire(directory: Path, objects: int, share: float) -> Row:
    store = _Bucket(directory)
    state = load(store)
    age_ms = objects // RUNS_OF_A_COMMIT * CYCLE_MS
    store.now_ms = START_MS + age_ms
    rule = TopicRule("", round(age_ms * (1 - share)), 0, "", None, "", "", "")
    found = plan_pass(store, state, lambda topic: rule, clock=Clock(wall_ms=store.clock_ms))
    commit_pass(store, state, found, clock=Clock(wall_ms=store.clock_ms))
    store.keep()
    return {"objects": len(found.objects), "expired_version": state.version, **_used()}


def _collect(directory: Path, objects: int, share: float) -> Row:
    store = _Bucket(directory)
    state = load(store)
    store.before = load(store, version=state.version - 1)
    store.now_ms = START_MS + objects // RUNS_OF_A_COMMIT * CYCLE_MS + GRACE_MS + 3_600_000
    plan = run_gc(store, state, apply=True, grace_ms=GRACE_MS, clock=store.clock_ms)
    return {"deleted": store.deleted, "kept": sum(plan.kept.values()), **_used()}


STEPS = {"build": _build, "expire": _expire, "collect": _collect}


def _used() -> Row:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"peak_bytes": usage.ru_maxrss * 1024, "cpu_s": round(time.process_time(), 1)}


def _summarize(rows: Sequence[Row]) -> list[Row]:
    """The memory of expiry and of the collection, and whether it is within the limit."""
    by_step = {row["step"]: row for row in rows}
    expired, collected = by_step["expire"], by_step["collect"]
    missed = []
    if expired["peak_bytes"] > PEAK_BYTES_MAX:
        missed.append("memory of the pass of expiry")
    if collected["peak_bytes"] > PEAK_BYTES_MAX:
        missed.append("memory of the collection")
    if collected["deleted"] < expired["objects"]:
        missed.append("not everything was collected")
    return [{"name": "garbage", "expired": expired, "collected": collected, "missed": missed}]


def _table(summaries: Sequence[Row]) -> str:
    (found,) = summaries
    expired, collected = found["expired"], found["collected"]
    return "\n".join(
        [
            f"expiry of {expired['objects']:,} objects: {expired['peak_bytes'] / MIB:.0f} of "
            f"{PEAK_BYTES_MAX / MIB:.0f} MiB, {expired['cpu_s']} s",
            f"collection: {collected['deleted']:,} objects deleted, {collected['kept']:,} kept, "
            f"{collected['peak_bytes'] / MIB:.0f} of {PEAK_BYTES_MAX / MIB:.0f} MiB, {collected['cpu_s']} s",
            *(f"MISSED: {what}" for what in found["missed"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

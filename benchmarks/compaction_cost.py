"""Requests and money of a day of an archive, with and without compaction: ``python -m benchmarks.compaction_cost``.

Plans the compaction of a synthetic day (every cycle has a run of every queue) with the real planner and default limits,
in rounds of new versions as `tiered run` has them, and prices requests and storage. Beside it the pattern of one append
for each queue and batch, as RocketMQ's tiered store has it: every 30 s the messages and the consume queue of each
queue. Prints Markdown, and JSON with ``--json``. Owns the day.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rocketmq_tiered.maintenance.compaction_job import CompactionForecast, forecast, limits_of
from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits, gains, plan_join, plan_rewrite
from rocketmq_tiered.maintenance.compaction_ranges import PageRange
from rocketmq_tiered.maintenance.compaction_round import PlannedRound
from rocketmq_tiered.maintenance.cost import Prices
from tiered.archive.rewrite.plan import Candidates
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE
from tiered.settings.sections import CompactionSettings, Settings

DAY_S = 86_400
CYCLE_S = 5
GROUP_COMMIT_S = 30
RECORD_BYTES = 1214
"""Of a message with a body of 1 KiB."""
GRACE_DAYS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compaction_cost", description=main.__doc__)
    parser.add_argument("--queues", type=int, default=100)
    parser.add_argument("--rate", type=int, default=10, help="messages of a queue each second")
    parser.add_argument("--ratio", type=float, default=0.31, help="stored bytes of a message byte")
    parser.add_argument("--memory", type=int, default=128, help="compaction.memory_bytes in MiB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    limits = limits_of(Settings(compaction=CompactionSettings(memory_bytes=options.memory << 20)), {})
    rows = priced(options.queues, options.rate, options.ratio, limits, Prices())
    if options.json:
        print(json.dumps(rows))
    else:
        print(table(rows))
    return 0


def day(queues: int, rate: int, ratio: float, first_cycle: int, cycles: int) -> Candidates:
    """``cycles`` cycles of a day: set objects with a run of every queue."""
    rows = rate * CYCLE_S
    numbers = np.arange(first_cycle, first_cycle + cycles)
    runs = np.zeros(cycles * queues, RUN_DTYPE)
    runs["queue"] = np.tile(np.arange(queues), cycles)
    runs["object"] = np.repeat(np.arange(cycles), queues)
    runs["ordinal"] = runs["queue"]
    cycle = np.repeat(numbers, queues)
    runs["version"] = cycle + 1
    runs["base_queue_offset"], runs["end_queue_offset"] = cycle * rows, (cycle + 1) * rows
    runs["rows"], runs["byte_count"] = rows, rows * RECORD_BYTES
    runs["base_byte"] = cycle * rows * RECORD_BYTES
    runs["min_store_timestamp"] = runs["max_store_timestamp"] = cycle * CYCLE_S * 1000
    objects = np.zeros(cycles, OBJECT_DTYPE)
    objects["key"] = np.arange(cycles)
    objects["raw_bytes"] = queues * rows * RECORD_BYTES
    objects["size_bytes"] = (objects["raw_bytes"] * ratio).astype(np.int64)
    objects["rows"] = queues * rows
    keys = [QueueKey(f"topic{number // 4:04d}", number % 4, 0) for number in range(queues)]
    return Candidates(
        keys,
        runs,
        objects,
        [f"sets/{number}" for number in numbers.tolist()],
        np.ones(cycles, bool),
        np.zeros(queues, np.int64),
        np.zeros(cycles, bool),
        np.ones(cycles),
    )


def compacted(queues: int, rate: int, ratio: float, limits: CompactionLimits) -> CompactionForecast:
    """Level 1 of a day, in rounds of at most ``limits.runs_max`` runs, and level 2 of its results."""
    found = CompactionForecast()
    cycles, step = DAY_S // CYCLE_S, max(1, limits.runs_max // queues)
    for first in range(0, cycles, step):
        candidates = day(queues, rate, ratio, first, min(step, cycles - first))
        for level in (plan_rewrite, plan_join):
            plan = level(candidates, limits)
            if plan is not None and gains(candidates, plan):
                found += forecast([PlannedRound(PageRange([]), candidates, plan)])
                break
    return replace(found, rounds=found.rounds)


def priced(
    queues: int, rate: int, ratio: float, limits: CompactionLimits, prices: Prices
) -> list[dict[str, float | str]]:
    """A row for each way of storing the day."""
    cycles = DAY_S // CYCLE_S
    stored = int(queues * rate * DAY_S * RECORD_BYTES * ratio)
    done = compacted(queues, rate, ratio, limits)
    batches = queues * DAY_S // GROUP_COMMIT_S
    plain = _row(
        "without compaction", prices, stored, objects=cycles, puts=2 * cycles, reader_gets=done.reader_gets
    )
    with_it = _row(
        "with compaction",
        prices,
        stored,
        objects=done.new_objects,
        puts=2 * cycles + done.puts,
        gets=done.gets,
        reader_gets=done.new_reader_gets,
        grace_bytes=done.source_bytes,
    )
    peer = _row(
        "one append a queue and batch", prices, int(stored / ratio), objects=2 * queues, puts=2 * batches
    )
    return [plain, with_it, peer]


def _row(
    name: str,
    prices: Prices,
    stored: int,
    *,
    objects: int,
    puts: int,
    gets: int = 0,
    reader_gets: int = 0,
    grace_bytes: int = 0,
) -> dict[str, float | str]:
    requests = prices.requests(puts=puts, gets=gets)
    return {
        "name": name,
        "objects": objects,
        "puts": puts,
        "gets": gets,
        "requests": requests,
        "stored_bytes": stored,
        "storage_month": prices.storage(stored),
        "grace": prices.storage(grace_bytes, GRACE_DAYS),
        "reader_gets": reader_gets,
        "read_once": prices.requests(gets=reader_gets),
    }


def table(rows: Sequence[dict[str, float | str]]) -> str:
    """Markdown."""
    names = {
        "objects": "data objects",
        "puts": "PUTs",
        "gets": "GETs of compaction",
        "requests": "requests, USD",
        "storage_month": "storage of the day a month, USD",
        "grace": "replaced objects until gc, USD",
        "reader_gets": "GETs of reading every queue once",
        "read_once": "their price, USD",
    }
    lines = ["| | " + " | ".join(str(row["name"]) for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for field, name in names.items():
        values = [row[field] for row in rows]
        lines.append(f"| {name} | " + " | ".join(_text(value) for value in values) + " |")
    return "\n".join(lines)


def _text(value: float | str) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


if __name__ == "__main__":
    raise SystemExit(main())

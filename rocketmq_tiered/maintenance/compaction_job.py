"""Compacts an archive round by round, and reports it: what `tiered compact` and the Spark job share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rocketmq_tiered.maintenance.compaction_plan import (
    DEAD_SHARE,
    CompactionLimits,
    IsWanted,
    gains,
    moved_bytes,
    reader_gets,
)
from rocketmq_tiered.maintenance.compaction_ranges import ObjectRunCounter
from rocketmq_tiered.maintenance.compaction_round import (
    PlannedRound,
    plan_rounds,
    run_round,
)
from rocketmq_tiered.maintenance.cost import PartSizes, Prices
from rocketmq_tiered.maintenance.damaged_sources import DamagedSources
from tiered.archive.rewrite.outputs import Rewrite, rewrite
from tiered.archive.rewrite.result import RewriteCost, RewriteOptions
from tiered.archive.rewrite.sources import IN_FLIGHT_BYTES, WHOLE_BYTES_MAX, readings_of
from tiered.archive.task import COMPACTION, Due, run_pass
from tiered.archive.unreadable import UnreadableRange
from tiered.catalog.garbage import settled_version
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK
from tiered.console import camel_names, counted, size_text
from tiered.errors import CorruptionError, NotFoundError, TopicKeyError, UnavailableError
from tiered.formats.keys import is_compacted
from tiered.formats.segment import BlockCodec
from tiered.object_store.interface import ObjectStore
from tiered.settings.quantities import written_duration
from tiered.settings.rules_in_force import topic_rules_in_force
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRules

MIB = 1 << 20
SOURCE_READ_BYTES = 16 * MIB
WINDOW_BYTES = 3584 * MIB
"""What the spool has without outputs."""
PARTS = PartSizes(16 * MIB, 16 * MIB)
COMMIT_PUTS = 3
"""PUTs of a round for its intent, its pages and its commit."""


@dataclass(frozen=True)
class CompactionForecast:
    """Sums of rounds. ``message_bytes``: before compression. ``read_bytes``: fetched and sent again by rewriting;
    ``copied_bytes``: copied inside the store by joining. ``source_bytes`` stay until gc deletes them. ``estimated``:
    rounds that were not planned, but are taken for the like of another one."""

    rounds: int = 0
    estimated: int = 0
    objects: int = 0
    new_objects: int = 0
    message_bytes: int = 0
    source_bytes: int = 0
    read_bytes: int = 0
    copied_bytes: int = 0
    gets: int = 0
    puts: int = 0
    reader_gets: int = 0
    new_reader_gets: int = 0

    def __add__(self, other: CompactionForecast) -> CompactionForecast:
        return CompactionForecast(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(self))
        )

    def times(self, factor: float) -> CompactionForecast:
        """An estimate for ``factor`` times as many rounds."""
        found = CompactionForecast(*(round(getattr(self, one.name) * factor) for one in fields(self)))
        return replace(found, estimated=found.rounds - self.rounds)

    @property
    def gets_saved(self) -> int:
        """Each time that every queue is read."""
        return self.reader_gets - self.new_reader_gets

    def price(self, prices: Prices, grace_days: float) -> float:
        """Price of the compaction: its requests and reads, and the sources kept for ``grace_days``."""
        requests = prices.requests(puts=self.puts, gets=self.gets)
        return requests + prices.reads(self.read_bytes) + prices.storage(self.source_bytes, grace_days)

    def saving(self, prices: Prices) -> float:
        """Each time that every queue is read."""
        return prices.requests(gets=self.gets_saved)


def forecast(rounds: Iterable[PlannedRound]) -> CompactionForecast:
    """The sum over ``rounds``, each with the later ones that are its like."""
    # Not a loop, whose variable would keep a round while the next one is planned.
    return sum(map(_of_its_like, rounds), CompactionForecast())


def _of_its_like(planned: PlannedRound) -> CompactionForecast:
    return of_round(planned).times(1 / planned.range.share)


def of_round(planned: PlannedRound) -> CompactionForecast:
    """What the round ``planned`` reads, writes and saves, forecast from the catalog alone."""
    candidates, plan = planned.candidates, planned.plan
    before, after = reader_gets(candidates, plan)
    output, _, size = moved_bytes(candidates, plan)
    all_bytes = candidates.objects["size_bytes"][plan.sources]
    source_bytes = int((all_bytes * candidates.share[plan.sources]).sum())
    read_bytes = 0 if plan.copies else int(size.sum())
    output_bytes = np.bincount(output, weights=size, minlength=len(plan.outputs))
    if plan.copies:
        gets = len(plan.sources)  # the end of each object, with its index and keys; the store copies the rest
    else:
        # Memory for parts of the objects may not suffice for one pass; small objects are read as a whole.
        passes = len(readings_of(candidates, plan.iterations, WINDOW_BYTES)[0])
        is_whole = int(all_bytes.sum()) <= WHOLE_BYTES_MAX * len(plan.sources)
        gets = len(plan.sources) * passes * (1 if is_whole else 2) + read_bytes // SOURCE_READ_BYTES
    return CompactionForecast(
        rounds=1,
        objects=round(planned.objects),
        new_objects=len(plan.outputs),
        message_bytes=planned.message_bytes,
        source_bytes=source_bytes,
        read_bytes=read_bytes,
        copied_bytes=source_bytes if plan.copies else 0,
        gets=gets,
        puts=COMMIT_PUTS + sum(PARTS.puts(int(size)) for size in output_bytes.tolist()),
        reader_gets=before,
        new_reader_gets=after,
    )


def carried_out(planned: PlannedRound) -> CompactionForecast:
    """Forecast of ``planned`` with only the sources that no later round needs: sums over all rounds are exact."""
    gone = planned.candidates.objects["size_bytes"][planned.gone]
    return replace(of_round(planned), objects=len(gone), source_bytes=int(gone.sum()))


DAY_MS = 24 * 3_600_000
TABLE_BYTES = 208
"""Memory of a run in the tables of a round and its plan, and of reading its ranges."""
GROWTH_MIN = 8
"""Plans made on demand write what a compaction wrote again only among so many times its bytes."""
RUNS_MAX = 1 << 20
"""Runs of a round, which also take no more than half of the memory."""
CHANGED_MAX = 5
"""Rounds in a row without effect, because a merge of pages or another compaction has changed the archive."""

Report = Callable[[int, int], None]
"""(message bytes done, total)."""


@dataclass(frozen=True)
class CompactionReport:
    """``rounds``: what is, or was, to do; ``cost``: what was moved for it. ``grace_days``: how long sources stay.
    ``young_objects``: of the uploader, younger than ``min_age_ms``; counted only if there is nothing to do."""

    is_applied: bool
    rounds: CompactionForecast
    cost: RewriteCost = field(default_factory=RewriteCost)
    prices: Prices = field(default_factory=Prices)
    grace_days: float = 3.0
    young_objects: int = 0
    min_age_ms: int = 0
    unreadable: tuple[UnreadableRange, ...] = ()
    """Messages of damaged objects, which stay where they are."""

    def document(self) -> dict[str, Any]:
        """The report as the JSON object that `--json` prints: the forecast, what was done, and prices."""
        done = {
            name: getattr(self.cost, name) for name in ("gets", "bytes_read", "bytes_sent", "bytes_copied")
        }
        document: dict[str, Any] = camel_names(asdict(self.rounds) | {"done": camel_names(done)})
        return document | {
            "readerGetsSaved": self.rounds.gets_saved,
            "savingEachRead": self.rounds.saving(self.prices),
            "price": self.rounds.price(self.prices, self.grace_days),
            "currency": self.prices.currency,
            "applied": self.is_applied,
            "youngObjects": self.young_objects,
            "unreadable": [camel_names(asdict(one)) for one in self.unreadable],
        }

    def lines(self, title: str) -> list[str]:
        """The report as lines to print: what was or would be joined, what that moves, saves and costs. If all objects
        are too young to be joined, only that."""
        rounds, cost, currency = self.rounds, self.cost, self.prices.currency
        if self.young_objects:
            age = written_duration(self.min_age_ms, " ")
            verb = "is" if self.young_objects == 1 else "are"
            young = counted(self.young_objects, "object")
            return [
                f"{title}: nothing to join yet: {young} {verb} younger than compaction.min_age_ms ({age})"
            ]
        verb = "joined" if self.is_applied else "dry run, add --apply to join:"
        moved = size_text(rounds.message_bytes)
        objects = ("about " if rounds.estimated else "") + counted(rounds.objects, "object")
        first = f"{title}: {verb} {objects}, {moved} of messages, to {rounds.new_objects:,}"
        if not rounds.rounds:
            return [first]
        if self.is_applied:
            read, sent, copied = map(size_text, (cost.bytes_read, cost.bytes_sent, cost.bytes_copied))
            move = f"moved: {counted(cost.gets, 'GET')}, {read} read, {sent} written, {copied} copied"
        else:
            again = f"{size_text(rounds.read_bytes)} to read and write again"
            move = f"to move: {again}, {size_text(rounds.copied_bytes)} to copy"
        saving, price = rounds.saving(self.prices), rounds.price(self.prices, self.grace_days)
        grace = written_duration(round(self.grace_days * DAY_MS))
        return [
            first,
            f"{move} inside the store",
            f"reading every queue once: {counted(rounds.reader_gets, 'GET')} before, {rounds.new_reader_gets:,} after, "
            f"{currency} {saving:.4f} saved each time",
            f"cost: {currency} {price:.4f}, for about {counted(rounds.gets, 'GET')}, {counted(rounds.puts, 'PUT')}, "
            f"and {size_text(rounds.source_bytes)} for {grace}, until gc deletes it",
        ]


def _in_flight_bytes(settings: Settings) -> int:
    """Bytes of reads in progress: a part of the memory."""
    return min(IN_FLIGHT_BYTES, settings.compaction.memory_bytes // 8)


def rewrite_options(settings: Settings, spool: Path) -> RewriteOptions:
    """What the settings say of a rewrite with objects in progress in ``spool``."""
    codec = BlockCodec(settings.offload.compression_level, settings.offload.block_bytes)
    is_secret = settings.object_store.encrypts
    return RewriteOptions(
        spool, settings.compaction.spool_bytes, codec, _in_flight_bytes(settings), is_secret=is_secret
    )


def limits_of(settings: Settings, archive_settings: Mapping[str, Any]) -> CompactionLimits:
    """The limits for plans of compaction, from the settings: sizes of objects, memory, and what is worth moving. A
    topic with an encryption key of its own shares no object with others; which topics these are, the rules of the
    archive's owner decide (``archive_settings``)."""
    own, rules = settings.compaction, TopicRules.of(topic_rules_in_force(settings, archive_settings))
    return CompactionLimits(
        memory_bytes=own.memory_bytes,
        split_bytes=own.split_bytes,
        block_bytes=settings.offload.block_bytes,
        object_bytes_max=own.object_bytes,
        set_bytes_max=own.object_bytes,
        joined_bytes_min=own.object_bytes // 2,
        dead_share_min=DEAD_SHARE,
        growth_min=GROWTH_MIN,
        table_bytes=TABLE_BYTES,
        in_flight_bytes=_in_flight_bytes(settings),
        runs_max=min(RUNS_MAX, own.memory_bytes // (2 * TABLE_BYTES)),
        is_alone=rules.has_own_key if rules.own_keys else None,
    )


def planned_rounds(
    store: ObjectStore,
    state: CatalogState,
    settings: Settings,
    limits: CompactionLimits | None = None,
    is_wanted: IsWanted = gains,
    counter: ObjectRunCounter | None = None,
    damaged: Set[str] = frozenset(),
) -> Iterator[PlannedRound]:
    """The rounds that compaction of ``state`` takes: each replaces some pages of the catalog, and the objects that they
    name, by one commit. Only commits older than compaction.min_age_ms take part, and ``damaged`` objects (their keys)
    stay where they are. One round is in memory at a time; ``counter`` caches counts of runs between calls."""
    return plan_rounds(
        store,
        state,
        limits or limits_of(settings, state.settings),
        before_version=_old_before(store, state, settings),
        is_wanted=is_wanted,
        counter=counter,
        damaged=damaged,
    )


def _old_before(store: ObjectStore, state: CatalogState, settings: Settings) -> int:
    """The first version that is too young."""
    before_ms = store.clock_ms() - settings.compaction.min_age_ms
    return settled_version(store, state.version, before_ms) + 1


def dry_run(store: ObjectStore, state: CatalogState, settings: Settings, prices: Prices) -> CompactionReport:
    """What `compact` would do first. Reads the catalog alone."""
    return _report(store, state, settings, _forecast(store, state, settings), prices)


def _forecast(
    store: ObjectStore,
    state: CatalogState,
    settings: Settings,
    counter: ObjectRunCounter | None = None,
    damaged: Set[str] = frozenset(),
) -> CompactionForecast:
    """What all rounds of compaction from ``state`` on would read, write and save."""
    return forecast(planned_rounds(store, state, settings, counter=counter, damaged=damaged))


class CompactionRounds:
    """Compacts round after round until none is left, as a task. ``report`` gets its progress."""

    name = COMPACTION
    due = Due(every_s=None)
    problem = ""

    def __init__(
        self,
        maintenance: MaintenanceCommit,
        settings: Settings,
        options: RewriteOptions,
        write: Rewrite,
        report: Report,
    ) -> None:
        """``write`` writes the new objects of a round, as ``options`` say."""
        self._maintenance, self._store, self._settings = maintenance, maintenance.store, settings
        self._options, self._write, self._report = options, write, report
        self._counter = ObjectRunCounter()
        # Message bytes of all rounds, as far as forecast; rounds in a row of which another commit was faster.
        self._expected_bytes = self._changed = 0
        self.done, self.cost, self.damaged = CompactionForecast(), RewriteCost(), DamagedSources()

    def plan(self, state: CatalogState) -> PlannedRound | None:
        """The next round; None if nothing is left to join. The first time, and when there is more to join than was
        forecast, all rounds are forecast again, for the progress."""
        planned = self._next(state)
        if planned is None or (self.done + carried_out(planned)).message_bytes <= self._expected_bytes:
            return planned
        # Once for many rounds: planning all of them again for each would take as long as joining them. This one is
        # planned twice, so that two are not in memory.
        del planned
        forecasts = _forecast(self._store, state, self._settings, self._counter, self.damaged.keys)
        self._expected_bytes = (self.done + forecasts).message_bytes
        return self._next(state)

    def step(self, state: CatalogState, planned: PlannedRound) -> bool:
        """Carry out the round ``planned``. If one of its objects is damaged, that is noted, and the next plan works
        around it. Raises UnavailableError if other commits were faster CHANGED_MAX times in a row; earlier rounds stay
        committed."""
        mine, before_bytes, all_bytes = carried_out(planned), self.done.message_bytes, self._expected_bytes

        def report(done_bytes: int) -> None:
            self._report(before_bytes + done_bytes, all_bytes)

        report(0)
        try:
            result = run_round(
                self._store,
                state,
                planned,
                replace(self._options, report=report),
                clock=MACHINE_CLOCK,
                write=self._write,
                maintenance=self._maintenance,
            )
        except (CorruptionError, NotFoundError, TopicKeyError):
            if not self.damaged.add(self._store, state, planned):
                raise
            return True
        self._changed = self._changed + 1 if result is None else 0
        if self._changed == CHANGED_MAX:
            raise UnavailableError(
                f"{self._store.url}: the archive changes faster than its objects are joined",
                hint="run tiered compact again later",
            )
        if result is not None:
            self.done += mine
            self.cost += result.cost
        return True

    def _next(self, state: CatalogState) -> PlannedRound | None:
        gc.collect()  # tables of the round before may be in a reference cycle
        self._options.release()
        rounds = planned_rounds(
            self._store, state, self._settings, counter=self._counter, damaged=self.damaged.keys
        )
        return next(rounds, None)


def compact_archive(
    store: ObjectStore,
    state: CatalogState,
    settings: Settings,
    options: RewriteOptions,
    prices: Prices,
    *,
    report: Report,
    write: Rewrite = rewrite,
) -> CompactionReport:
    """Compact the archive, round after round, and return what was done. ``report`` gets the progress; ``write`` writes
    new objects. Raises UnavailableError if the archive changes too fast, and the store's errors."""
    # One for all rounds: opening an archive with thousands of queues takes as long as planning a round.
    maintenance = MaintenanceCommit.opened(store, state, "compact", MACHINE_CLOCK)
    rounds = CompactionRounds(maintenance, settings, options, write, report)
    run_pass(rounds, chain([state], iter(maintenance.refresh, None)).__next__)
    summary = _report(store, maintenance.state, settings, rounds.done, prices, rounds.cost)
    return replace(summary, unreadable=rounds.damaged.ranges)


def _report(
    store: ObjectStore,
    state: CatalogState,
    settings: Settings,
    rounds: CompactionForecast,
    prices: Prices,
    cost: RewriteCost | None = None,
) -> CompactionReport:
    """The report of ``rounds``, which were carried out if ``cost`` is given, else only planned. Without rounds it
    counts the objects that are too young to be joined."""
    young = 0 if rounds.rounds else _young_objects(store, state, _old_before(store, state, settings))
    days = settings.gc.grace_ms / DAY_MS
    return CompactionReport(
        cost is not None,
        rounds,
        cost or RewriteCost(),
        prices,
        days,
        young,
        settings.compaction.min_age_ms,
    )


def _young_objects(store: ObjectStore, state: CatalogState, first_version: int) -> int:
    """How many objects of the uploader, not of an earlier compaction, have living runs (rows of one queue) that catalog
    versions from ``first_version`` on added."""
    keys: set[str] = set()
    for page in living_runs(RunIndex(store), state, first_version):
        chunk = page.chunk
        young = np.unique(chunk.runs["object"][chunk.runs["version"] >= first_version])
        keys |= {chunk.object_keys[number] for number in chunk.objects["key"][young].tolist()}
    return sum(not is_compacted(key) for key in keys)

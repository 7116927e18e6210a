"""Carries out the plan of a rewrite: reads the sources, writes the outputs, puts them. Commits nothing.

An output grows in a local file and is put when it is complete: the segment of one queue at once, one of many queues (a
set) when its last iteration has ended. Joined objects are copied by the store, and only their keys and tail are sent.
After a PUT without a response the same object is put under another key.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tiered.archive.rewrite.plan import RANGE_DTYPE, Candidates, OutputPart, RewritePlan, sequence_bounds
from tiered.archive.rewrite.result import (
    OutputIdentity,
    RewriteCost,
    RewriteOptions,
    RewriteResult,
    check_totals,
    cover_holes,
    key_of,
    spool_bytes,
)
from tiered.archive.rewrite.sources import RewriteSources
from tiered.archive.rewrite.spool import IterationSpool, ReadRanges
from tiered.errors import (
    FULL_ERRNOS,
    CorruptionError,
    StoreFullError,
    ThrottledError,
    UnansweredError,
    UsageError,
)
from tiered.formats.segment import SegmentMeta
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import HEADER_BYTES
from tiered.formats.segment_writer import SegmentWriter, WrittenSegment
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, RunKind, Table, concatenated, copied, picked
from tiered.object_store.interface import FileRange, ObjectRange, ObjectStore, Piece, compose_own
from tiered.object_store.part_plan import sent_bytes
from tiered.object_store.secret_file import SecretFile, new_secret
from tiered.private_directory import private_temporary

logger = logging.getLogger(__name__)

ATTEMPTS_MAX = 5
WAIT_S = 1.0
BATCH_BYTES = 1024 * 1024
"""Records that are added to an output together."""
BATCH_ROWS = 16_384
"""Rows of whole runs that are added together, or of one run."""


Rewrite = Callable[[ObjectStore, Candidates, RewritePlan, OutputIdentity, RewriteOptions], RewriteResult]


def rewrite(
    store: ObjectStore,
    candidates: Candidates,
    plan: RewritePlan,
    identity: OutputIdentity,
    options: RewriteOptions,
) -> RewriteResult:
    """Carry out ``plan``: read its source objects, and write and put all its outputs. The caller commits the result.
    Raises UsageError if the directory for temporary files may not hold enough, StoreFullError if its disk is full,
    CorruptionError if a source is not what the catalog says, or the store's errors; what was put until then is garbage.
    """
    needed = spool_bytes(candidates, plan)
    if needed > options.spool_bytes_max:
        raise UsageError(
            f"this compaction needs {needed:,} bytes in {options.spool_directory}, more than the "
            f"{options.spool_bytes_max:,} that it may use",
            hint="raise compaction.spool_bytes for now, and report this as a bug: plans should stay below that limit",
        )
    options.release()  # what planning has freed
    with private_temporary(options.spool_directory, "compaction-") as directory:
        spool = Path(directory)
        file, room = spool / "sources", options.spool_bytes_max - needed
        spooled = IterationSpool(file, is_secret=options.is_secret)
        sources = RewriteSources(store, candidates, spooled, room, options.in_flight_bytes, plan)
        try:
            run = _Rewriting(store, candidates, plan, identity, options, sources, spool)
            return run.join() if plan.copies else run.rewrite()
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                raise
            raise StoreFullError(
                f"the compaction ends, as no space is left in {options.spool_directory}, its directory for temporary "
                "files",
                hint="free space in this directory, or set another one",
            ) from error
        finally:
            sources.close()


def compact(
    store: ObjectStore,
    candidates: Candidates,
    plan: RewritePlan,
    identity: OutputIdentity,
    options: RewriteOptions,
    write: Rewrite = rewrite,
) -> RewriteResult:
    """Carry out ``plan`` with ``write``, and check that the result has the same messages of each queue, without those
    that key compaction drops. Raises what ``write`` raises, and CorruptionError if something else is missing."""
    result = write(store, candidates, plan, identity, options)
    cover_holes(candidates, plan, result.runs)
    check_totals(candidates, plan, result.runs)
    return result


@dataclass
class _Open:
    """An output in progress, in a local ``file``, which is encrypted with ``secret`` if there is one. ``has_rows``:
    whether rows were added."""

    file: BinaryIO
    path: Path
    writer: SegmentWriter
    secret: bytes
    has_rows: bool = False

    def blocks(self, segment: WrittenSegment) -> list[Piece]:
        """The header and all blocks, which are in the file."""
        self.file.flush()
        return [FileRange(str(self.path), 0, HEADER_BYTES + segment.blocks_bytes, self.secret)]


class _Rewriting:
    """One plan being carried out."""

    def __init__(
        self,
        store: ObjectStore,
        candidates: Candidates,
        plan: RewritePlan,
        identity: OutputIdentity,
        options: RewriteOptions,
        sources: RewriteSources,
        spool: Path,
    ) -> None:
        """``candidates`` and ``plan``: what is compacted; ``identity``: what keys and footers of outputs name;
        ``spool``: the directory for temporary files. Reads and writes nothing."""
        self._store = store
        self._candidates = candidates
        self._plan = plan
        self._identity = identity
        self._options = options
        self._sources = sources
        self._spool = spool
        self._attempts = len(plan.outputs)
        """How many numbers of attempts are used: the first attempt of each output has the output's number."""
        self._last_iteration = {
            part.output: number for number, iteration in enumerate(plan.iterations) for part in iteration
        }
        self._head_runs, self._head_rows = _sequence_heads(candidates, plan)
        self._heads = {run: number for number, run in enumerate(self._head_runs.tolist())}
        from_phys, to_phys = candidates.objects["min_phys"], candidates.objects["end_phys"]
        self._phys = max(0, int(from_phys[plan.sources].min())), max(0, int(to_phys[plan.sources].max()))
        self._queue_numbers = {queue: number for number, queue in enumerate(candidates.queues)}
        self._runs: list[Table] = []
        self._objects: list[NDArray[Any]] = []
        self._keys: list[str] = []
        self._abandoned: list[str] = []
        self._cost = RewriteCost()

    def rewrite(self) -> RewriteResult:
        """Carry out the plan, iteration by iteration: add what was read to the outputs, and put each when it is
        complete."""
        done_bytes = 0
        shared: dict[int, _Open] = {}
        with ExitStack() as files:
            reads = self._sources.read(self._plan.iterations)
            for number, iteration in enumerate(self._plan.iterations):
                read = next(reads)
                for part, ranges in zip(iteration, _by_part(iteration, read), strict=True):
                    is_set = self._plan.outputs[part.output].is_set
                    output = shared.pop(part.output, None) or self._open(part.output, files)
                    self._append(output, part, ranges)
                    if is_set and self._last_iteration[part.output] > number:
                        shared[part.output] = output
                    else:
                        self._close(output, part)
                    done_bytes += part.message_bytes
                    self._options.report(done_bytes)
                del read, ranges
        return self._result()

    def join(self) -> RewriteResult:
        """Carry out a plan whose outputs are whole sources one behind the other: the store copies their blocks, and
        only rows and keys are read and written."""
        done_bytes = 0
        for (part,) in self._plan.iterations:
            writer = SegmentWriter(None, self._options.codec)
            stored_blocks: list[Piece] = []
            for one in part.ranges:
                index, keys = self._sources.open(int(self._candidates.runs["object"][int(one["run"])]))
                rows = self._sources.whole_run(index, keys, int(one["run"]))
                if not stored_blocks:
                    queue = self._candidates.queues[int(self._candidates.runs["queue"][int(one["run"])])]
                    writer.begin_runs([queue], self._heads_of([int(one["run"])]))
                writer.add_rows(rows, self._sources.parents.queues)
                writer.add_stored(index.blocks, [])
                stored_blocks += _copied(index, is_first=not stored_blocks)
            self._put(writer, part, stored_blocks)
            done_bytes += part.message_bytes
            self._options.report(done_bytes)
        return self._result()

    # -- writing -----------------------------------------

    def _heads_of(self, runs: Sequence[int]) -> Table:
        """The begins of the new runs (RUN_DTYPE) whose sequences begin with the candidates' ``runs``."""
        return picked(self._head_rows, np.array([self._heads[run] for run in runs], np.int64))

    def _open(self, output: int, files: ExitStack) -> _Open:
        path = self._spool / str(output)
        secret = new_secret() if self._options.is_secret else b""
        file = files.enter_context(SecretFile(path, secret) if secret else path.open("wb", buffering=1 << 20))
        return _Open(file, path, SegmentWriter(file, self._options.codec), secret)

    def _append(self, output: _Open, part: OutputPart, read: ReadRanges) -> None:
        """Add ``read``, the ranges of ``part`` that have rows, to ``output``: begin runs where sequences begin, and
        add rows and messages."""
        if not len(read.ranges):
            return
        is_set = self._plan.outputs[part.output].is_set
        ranges = picked(part.ranges, read.ranges["ordinal"])
        is_sparse = not is_set and self._is_sparse(ranges)
        if is_sparse:
            read = read.without_holes()
        if is_set:
            begins = (ranges["begin"] == 0) & np.isin(ranges["run"], self._head_runs)
        else:
            begins = np.zeros(len(ranges), bool)
            begins[0] = not output.has_rows
        bounds = np.unique([0, *np.flatnonzero(begins), len(ranges)])
        rows = np.cumsum(np.add.reduceat(read.ranges["rows"], bounds[:-1], dtype=np.int64))
        cuts = [0, *(np.flatnonzero(np.diff(rows // BATCH_ROWS)) + 1).tolist(), len(rows)]
        for (first, last), one in zip(pairwise(cuts), read.cut(bounds[cuts].tolist()), strict=True):
            place = int(bounds[first])
            new = [at for at in bounds[first:last].tolist() if begins[at]]
            self._begin_runs(
                output.writer, ranges["run"][new].tolist(), read, is_set=is_set, is_sparse=is_sparse
            )
            self._add(output.writer, one, bounds[first : last + 1] - place)
        output.has_rows = True

    def _is_sparse(self, ranges: Table) -> bool:
        """Whether an object of one queue with ``ranges`` may have offsets without a row: key compaction drops rows, or
        did so before."""
        kinds = self._candidates.runs["kind"][ranges["run"]]
        return self._plan.selection is not None or bool((kinds == RunKind.SPARSE).any())

    def _begin_runs(
        self, writer: SegmentWriter, new: list[int], read: ReadRanges, *, is_set: bool, is_sparse: bool
    ) -> None:
        """Begin a run in the output for each of the candidates' runs ``new``: the first of each sequence, whose runs
        become one. A set (``is_set``) has a run for each queue; the output of one queue has one run, which begins with
        the first row of ``read``. ``is_sparse``: rows between others are dropped, so that the run has holes."""
        if new:
            runs = self._candidates.runs
            queues = [self._candidates.queues[number] for number in runs["queue"][new].tolist()]
            heads = self._heads_of(new) if is_set else _head_of(runs[new[0]], read).reshape(1)
            if is_sparse:
                heads["kind"] = RunKind.SPARSE
            writer.begin_runs(queues, heads)

    def _add(self, writer: SegmentWriter, read: ReadRanges, bounds: NDArray[np.int64]) -> None:
        """Add rows and messages of ``read`` to the last runs of the output; each of these has the ranges from one of
        ``bounds`` up to the next."""
        counts = np.add.reduceat(read.ranges["rows"], bounds[:-1], dtype=np.int64)
        rows = read.row_table(bounds)
        writer.add_rows(rows, self._sources.parents.queues, counts)
        for batch in read.batches(bounds, BATCH_BYTES):
            run = batch.run - len(counts)  # the writer counts runs from its last one, which is -1
            if len(batch.blocks):
                writer.add_stored(batch.blocks, batch.data, run)
            else:
                _add_records(writer, batch.data, rows.size[batch.first_row : batch.end_row], run)

    def _close(self, output: _Open, part: OutputPart) -> None:
        """Put a complete output, unless it has no rows, and delete its local file."""
        if output.has_rows:
            self._put(output.writer, part, output)
        output.file.close()
        output.path.unlink()

    def _put(self, writer: SegmentWriter, part: OutputPart, blocks: list[Piece] | _Open) -> None:
        """Put a complete output under a key that no other attempt has, again under another key if the store does not
        answer, and add it to the result. ``blocks``: its header and blocks, or the output in whose file they are.
        Raises what the store raises in the last of ATTEMPTS_MAX attempts."""
        for again in range(ATTEMPTS_MAX):
            number = part.output
            if again:
                number, self._attempts = self._attempts, self._attempts + 1
            key = key_of(
                self._candidates, self._plan, self._identity, part.output, int(part.ranges["run"][0]), number
            )
            segment = writer.finish(self._meta(number))
            stored = blocks.blocks(segment) if isinstance(blocks, _Open) else blocks
            sent: list[Piece] = [*stored, segment.keys, segment.tail]
            if again:
                self._options.announce(key)
            try:
                compose_own(self._store, key, sent, str(self._spool))
            except ThrottledError:
                if again + 1 == ATTEMPTS_MAX:
                    raise
                self._options.wait(WAIT_S * 2**again)
            except UnansweredError:
                self._abandoned.append(key)
                if again + 1 == ATTEMPTS_MAX:
                    raise
                logger.warning(
                    "the store did not answer the PUT of %s: the object is put under another key", key
                )
            else:
                sent_size = sent_bytes(sent)
                self._cost.bytes_sent += sent_size
                self._cost.bytes_copied += segment.size_bytes - sent_size
                self._record(segment, key, part.output)
                return

    def _meta(self, attempt: int) -> SegmentMeta:
        """What the footer of an output says of its origin, when the attempt number ``attempt`` puts it."""
        own = self._identity
        return SegmentMeta(
            own.cluster,
            own.broker,
            own.epoch,
            own.first_attempt + attempt,
            own.history,
            own.catalog_version,
            *self._phys,
            own.created_ms,
            "compact",
        )

    def _record(self, segment: WrittenSegment, key: str, output: int) -> None:
        """Add the stored object ``key``, the output number ``output`` of the plan, to the result: its row of the object
        table, and its runs, whose queues are numbered as those of the candidates."""
        runs = segment.runs.copy()
        # A parent queue of LMQ rows may be no candidate: it has no runs here, so that its number, 0, is not used.
        numbers = [self._queue_numbers.get(queue, 0) for queue in segment.queues]
        runs["queue"] = np.array(numbers, np.uint32)[runs["queue"]]
        runs["object"] = len(self._objects)
        runs["version"] = self._plan.outputs[output].version
        row = segment.object_row(self._identity.epoch, self._plan.outputs[output].ttl_class_days)
        row["key"] = len(self._objects)
        self._runs.append(runs)
        self._objects.append(row)
        self._keys.append(key)

    def _result(self) -> RewriteResult:
        """What the caller commits: the outputs, the keys of PUTs without an answer, and how many requests and bytes the
        compaction took."""
        self._cost.gets, self._cost.bytes_read = self._sources.gets, self._sources.bytes_read
        return RewriteResult(
            runs=concatenated(self._runs, RUN_DTYPE),
            objects=concatenated(self._objects, OBJECT_DTYPE),
            object_keys=self._keys,
            abandoned=self._abandoned,
            cost=self._cost,
        )


def _sequence_heads(candidates: Candidates, plan: RewritePlan) -> tuple[NDArray[np.int64], Table]:
    """The begins of the new runs (RUN_DTYPE) in sets (objects of many queues) and in objects whose blocks the store
    copies: a new run is a sequence of the candidates' runs, and begins as its first one does. Returns the numbers of
    these first runs, and the begins, with the lowest time and commitlog offset of the sequence."""
    ranges: dict[int, list[NDArray[Any]]] = {}
    for iteration in plan.iterations:
        for part in iteration:
            if plan.copies or plan.outputs[part.output].is_set:
                ranges.setdefault(part.output, []).append(part.ranges)
    firsts, heads = [np.zeros(0, np.int64)], []
    for of_output in ranges.values():
        moved = concatenated(of_output, RANGE_DTYPE)
        numbers = moved["run"][moved["begin"] == 0]
        runs = picked(candidates.runs, numbers)
        begins = np.array([first for first, _ in sequence_bounds(runs)], np.int64)
        own = picked(runs, begins)
        for name in ("min_store_timestamp", "min_phys"):
            own[name] = np.minimum.reduceat(runs[name], begins)
        firsts.append(numbers[begins])
        heads.append(own)
    return np.concatenate(firsts), concatenated(heads, RUN_DTYPE)


def _head_of(run: Any, read: ReadRanges) -> Any:
    """The begin of the run of an output of one queue that begins with ``read``, inside the run ``run`` of the
    candidates: offset, byte, time and commitlog offset."""
    head = run.copy()
    head["base_queue_offset"] = read.ranges["base_queue_offset"][0]
    if int(head["kind"]) != RunKind.LMQ:
        head["base_byte"] += read.ranges["begin_byte"][0]
    head["min_store_timestamp"] = read.rows["store_timestamp"].min()
    head["min_phys"] = read.rows["phys"].min()
    return head


def _add_records(
    writer: SegmentWriter, records: Sequence[bytes | memoryview], sizes: NDArray[Any], run: int
) -> None:
    try:
        writer.add_records(records, sizes, run)
    except ValueError as error:
        raise CorruptionError(str(error)) from error


def _by_part(iteration: Sequence[OutputPart], read: ReadRanges) -> Iterator[ReadRanges]:
    """``read``, the ranges of a whole iteration, divided into those of each of its parts, whose ordinals begin at 0
    again."""
    ends = np.cumsum([0, *(len(part.ranges) for part in iteration)])
    bounds = np.searchsorted(read.ranges["ordinal"], ends).tolist()
    for begin, one in zip(ends.tolist(), read.cut(bounds), strict=False):
        ranges = copied(one.ranges)
        ranges["ordinal"] -= begin
        yield replace(one, ranges=ranges)


def _copied(index: SegmentIndex, *, is_first: bool) -> list[Piece]:
    """The blocks of a source; of the first one with its header, so that no byte is sent."""
    end = index.key_span[0]
    if not is_first:
        return [ObjectRange(index.key, HEADER_BYTES, end - HEADER_BYTES)]
    return [ObjectRange(index.key, 0, end)]

"""Decodes a segment: its tail into an index of runs, blocks and rows, and its stored blocks into records. No I/O.

Bytes from an object store are untrusted. Every length is bounded by a checked one, every CRC32C is verified before the
bytes are used, and the footer's tables must agree; a mismatch is a CorruptionError that names key and range.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from tiered.errors import CorruptionError, TieredError, UnsupportedFormatError
from tiered.formats.container import Container, decode_container
from tiered.formats.memory_bound import memory_contained
from tiered.formats.page_cache import Columns, PageCache
from tiered.formats.page_decoder import COLUMN_KINDS, decode_column_page
from tiered.formats.run_part import CatalogRun, RunPart
from tiered.formats.segment import RowTable, SegmentMeta
from tiered.formats.segment_layout import (
    BLOCK_DTYPE,
    BLOCK_RAW_BYTES_MAX,
    CODEC_RAW,
    CODEC_ZSTD,
    FOOTER_KIND,
    HEADER_BYTES,
    PAGE_DTYPE,
    PAGE_ROWS,
    PART_DTYPE,
    PART_KIND,
    RECORD_BYTES_MAX,
    SEGMENT_RUN_DTYPE,
    TRAILER_BYTES,
    RunView,
    decode_trailer,
)
from tiered.formats.stored_block import expand_block, expand_into, inflate
from tiered.kernels.columns import LENGTHS_BYTES, STREAMS, VARINT_BYTES_MAX
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import QueueRoster, QueueSelection
from tiered.model.tables import QUEUE_DTYPE, RUN_DTYPE, RunKind, Table, begins, concatenated

SPAN_RAW_BYTES_MAX = 64 * 1024 * 1024
"""Raw bytes of a piece of a span: limits memory for blocks that compress well."""

CATALOG_RUN_FIELDS = ("kind", "base_queue_offset", "end_queue_offset", "rows", "base_byte", "byte_count")
"""Fields of a run that the catalog and its object must agree on, unless the catalog names a part of it."""

_part_fields = operator.itemgetter(
    *map(
        (SEGMENT_RUN_DTYPE.names or ()).index,
        ("kind", "base_queue_offset", "end_queue_offset", "first_row", "rows", "base_byte", "byte_count"),
    )
)

_decoded_pages = PageCache()
"""Of all segments that this process reads."""

_ROWS_MAX = 1 << 40
_RUNS_MAX = 1 << 22
_PAGE_ROW_BYTES_MIN = 4


class BlockSpan(NamedTuple):
    """Consecutive blocks that hold rows of one run: bytes [offset, offset + length) of the object.

    They hold rows [first_row, end_row) of the run. ``raw_offset``: where their raw bytes begin in the run's; negative
    when the first block begins with records of earlier runs. Records of later runs may follow the run's last row.
    """

    first_block: int
    end_block: int
    offset: int
    length: int
    first_row: int
    end_row: int
    raw_offset: int
    raw_bytes: int


class SegmentBounds(NamedTuple):
    """Where runs and blocks begin in an object, each with the end of the last: among its rows, and among its
    decompressed bytes. LMQ runs count nothing, as they have no blocks. Of an index of one part: its runs alone, but all
    blocks."""

    run_rows: NDArray[np.int64]
    run_raw: NDArray[np.int64]
    block_rows: NDArray[np.int64]
    block_raw: NDArray[np.int64]

    @classmethod
    def of(cls, runs: Table, blocks: Table, before: tuple[int, int] = (0, 0)) -> SegmentBounds:
        """``runs``: SEGMENT_RUN_DTYPE, behind so many rows and raw bytes ``before`` them; ``blocks``: BLOCK_DTYPE."""
        is_lmq = runs["kind"] == RunKind.LMQ
        return cls(
            begins(np.where(is_lmq, 0, runs["rows"])) + before[0],
            begins(np.where(is_lmq, 0, runs["byte_count"])) + before[1],
            begins(blocks["rows"]),
            begins(blocks["raw_bytes"]),
        )


@dataclass(frozen=True)
class KeySection:
    """Key hashes of all rows, row after row; ``counts[row]`` of them belong to a row."""

    counts: NDArray[np.uint16]
    hashes: NDArray[np.uint64]


class SegmentIndex:
    """The decoded tail of one segment, or a part of it: runs under their numbers in the object. Immutable; may be
    shared by threads."""

    def __init__(self, key: str, size_bytes: int, tail: bytes, part: int | None = None) -> None:
        """``tail``: the last bytes of the object, from its footer or further ahead. ``part``: the only one to decode,
        if the tail has parts, which takes time and memory by the runs of one.

        Raises CorruptionError or UnsupportedFormatError.
        """
        self.key = key
        self.size_bytes = size_bytes
        trailer = decode_trailer(tail, size_bytes, source=key)
        start = size_bytes - len(tail)
        if trailer.tail_offset < start:
            raise CorruptionError(
                f"{key}: its tail begins at byte {trailer.tail_offset}, but only bytes from {start} on were read"
            )
        footer = memoryview(tail)[trailer.footer_offset - start : len(tail) - TRAILER_BYTES]
        if fastcrc.crc32.iscsi(footer) != trailer.footer_crc32c:
            raise CorruptionError(
                f"{key}: footer [{trailer.footer_offset}, {size_bytes - TRAILER_BYTES}) fails its CRC32C"
            )
        container = decode_container(footer, FOOTER_KIND, source=f"{key} footer at {trailer.footer_offset}")
        self.version = trailer.version
        self.tail_offset = trailer.tail_offset
        before_footer = memoryview(tail)[trailer.tail_offset - start : trailer.footer_offset - start]
        try:
            with memory_contained(key):
                self._load(container, before_footer, part)
                self._check()
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise CorruptionError(
                f"{key}: footer at {trailer.footer_offset} is impossible: {error}"
            ) from error
        self._number = _decoded_pages.number_of(self)

    def row_of(self, ordinal: int) -> int:
        """The number of the first row of a run in the object."""
        return int(self.first_row[ordinal - self.first_run])

    def byte_count_of(self, ordinal: int) -> int:
        """Message bytes of a run."""
        return int(self.runs["byte_count"][ordinal - self.first_run])

    def _load(self, container: Container, before_footer: memoryview, part: int | None) -> None:
        """Takes header and tables of the footer, and sums up where runs, blocks and pages begin. Raises
        UnsupportedFormatError for features of later versions, and ValueError for impossible numbers of runs or
        rows."""
        header = container.header
        if header.get("encryption") is not None or header.get("dictionaries"):
            raise UnsupportedFormatError(
                f"{self.key} is encrypted inside, or compressed with dictionaries, which this version of"
                " rocketmq-tiered cannot read",
                hint="use a newer version of rocketmq-tiered",
            )
        meta = header["meta"]
        self.meta = SegmentMeta(
            **{name: meta[name] for name in SegmentMeta.__dataclass_fields__ if name in meta}
        )
        self.topics = list(map(str, header["topics"]))
        container.charge_queues()
        self.queue_table = _table(container, "queues", QUEUE_DTYPE)
        self.blocks = _table(container, "blocks", BLOCK_DTYPE)
        self.pages = _table(container, "pages", PAGE_DTYPE)
        keys = header["keys"]
        self.key_count = int(keys["count"])
        self._stored_counts_bytes = int(keys["stored_counts_bytes"])
        self._keys_crc32c = int(keys["crc32c"])
        parts = np.zeros(0, PART_DTYPE)
        if "parts" in container.tables:
            parts = _table(container, "parts", PART_DTYPE)
        chosen = range(len(parts)) if part is None or part >= len(parts) else range(part, part + 1)
        self.is_whole = len(chosen) == len(parts)
        """Whether it has all runs of the object."""
        # What the parts before each part have together; below only of the parts that are chosen.
        sums = {name: begins(parts[name]) for name in PART_DTYPE.names or ()}
        self._pages_bytes = len(before_footer) - int(sums["stored_bytes"][-1])
        sums = {name: column[chosen.start : chosen.stop + 1] for name, column in sums.items()}
        self.first_run = int(sums["runs"][0])
        """The number of the first of ``runs`` in the object."""
        if len(parts):
            self._load_parts(before_footer, (self._pages_bytes + sums["stored_bytes"]).tolist())
        else:
            self.runs = _table(container, "runs", SEGMENT_RUN_DTYPE)
        rows_of_run = self.runs["rows"]
        if len(self.runs) > _RUNS_MAX or bool(((rows_of_run < 1) | (rows_of_run > _ROWS_MAX)).any()):
            raise ValueError("impossible numbers of runs or rows")
        self._base_byte = self.runs["base_byte"]
        self._view = RunView.of(self.runs, int(sums["rows"][0]))
        self.first_row = self._view.first_row
        before = int(sums["block_rows"][0]), int(sums["raw_bytes"][0])
        self.bounds = SegmentBounds.of(self.runs, self.blocks, before)
        self._run_row, self._run_raw, self._block_row, self._block_raw = self.bounds
        self._block_offset = begins(self.blocks["stored_bytes"]) + HEADER_BYTES
        self._page_row = begins(self.pages["rows"])
        self._page_offset = begins(self.pages["stored_bytes"])
        columns = {"rows": self.first_row, "block_rows": self._run_row, "raw_bytes": self._run_raw}
        at = sums["runs"] - self.first_run
        if len(parts) and (
            at[-1] != len(self.runs) or any((columns[name][at] != sums[name]).any() for name in columns)
        ):
            raise ValueError("parts have other numbers of runs, rows or bytes than the footer says")
        self._load_pages(before_footer)

    def _load_pages(self, before_footer: memoryview) -> None:
        """Takes the column pages with rows of ``runs``. Raises ValueError unless a page begins with the first of these
        rows, and one ends with the last."""
        ends = self.first_row[0], self.first_row[-1]
        self._pages = range(*np.searchsorted(self._page_row, ends).tolist())
        """The numbers of these pages."""
        if (
            self._pages.stop >= len(self._page_row)
            or (self._page_row[[self._pages.start, self._pages.stop]] != ends).any()
        ):
            raise ValueError("the column pages do not have exactly the rows of the runs")
        first, end = self._page_offset[[self._pages.start, self._pages.stop]].tolist()
        self._page_bytes, self._pages_offset = bytes(before_footer[first:end]), first

    def _load_parts(self, before_footer: memoryview, ends: Sequence[int]) -> None:
        """Takes topics, queues and runs of the parts between these ends, each numbered behind those before."""
        queues, runs = [self.queue_table], list[Table]()
        for begin, end in pairwise(ends):
            where = f"{self.key} part at {self.tail_offset + begin}"
            part = decode_container(before_footer[begin:end], PART_KIND, source=where)
            part.charge_queues()
            runs.append(_table(part, "runs", SEGMENT_RUN_DTYPE))
            table = _table(part, "queues", QUEUE_DTYPE)
            table["topic"] += len(self.topics)
            runs[-1]["queue"] += sum(map(len, queues))
            queues.append(table)
            self.topics += map(str, part.header["topics"])
        self.queue_table = concatenated(queues, QUEUE_DTYPE)
        self.runs = concatenated(runs, SEGMENT_RUN_DTYPE)

    def _check(self) -> None:
        """Raises ValueError with the names of all checks that fail: tables that contradict each other, or sizes
        beyond a limit."""
        runs, blocks, pages = self.runs, self.blocks, self.pages
        keys_offset, keys_bytes = self.key_span
        raw_max = np.where(blocks["rows"] > 1, BLOCK_RAW_BYTES_MAX, RECORD_BYTES_MAX)
        large = blocks["raw_bytes"] > raw_max
        page_rows = pages["rows"].astype(np.int64)
        page_raw_min = page_rows * _PAGE_ROW_BYTES_MIN + LENGTHS_BYTES
        page_raw_max = page_rows * STREAMS * VARINT_BYTES_MAX + LENGTHS_BYTES
        impossible_page = (pages["raw_bytes"] > page_raw_max) | (pages["raw_bytes"] < page_raw_min)
        is_lmq = runs["kind"] == RunKind.LMQ
        checks = {
            "number of runs": len(runs) == 0,
            "kinds of runs": bool((runs["kind"] > max(RunKind)).any()),
            "topics of queues": int(self.queue_table["topic"].max(initial=0)) >= len(self.topics),
            "queues of runs": int(runs["queue"].max(initial=0)) >= len(self.queue_table),
            "number of blocks": self.is_whole and int(runs["blocks"].sum(dtype=np.int64)) != len(blocks),
            "bytes of LMQs": bool((is_lmq & ((runs["byte_count"] != 0) | (runs["blocks"] != 0))).any()),
            "bytes of runs": bool((~is_lmq & (runs["byte_count"] < 1)).any()),
            "first rows of runs": bool(runs["first_row"].any()),
            "rows of blocks": self._differs(self._run_row, self._block_row),
            "bytes of blocks": self._differs(self._run_raw, self._block_raw),
            "codecs": bool((blocks["codec"] > CODEC_ZSTD).any() or (pages["codec"] > CODEC_ZSTD).any()),
            "sizes of what is stored raw": _raw_differs(blocks) or _raw_differs(pages),
            "sizes of blocks": bool(
                large.any() or (blocks["rows"] < 1).any() or (blocks["raw_bytes"] < 1).any()
            ),
            "sizes of pages": bool((impossible_page | (page_rows < 1) | (page_rows > PAGE_ROWS)).any()),
            "stored sizes": bool((blocks["stored_bytes"] < 1).any() or (pages["stored_bytes"] < 1).any()),
            "number of keys": self.key_count < 0 or self._stored_counts_bytes < 0,
            "length of blocks": keys_offset + keys_bytes != self.tail_offset,
            "length of pages": int(self._page_offset[-1]) != self._pages_bytes,
        }
        wrong = [name for name, is_wrong in checks.items() if is_wrong]
        if wrong:
            raise ValueError(f"wrong {', '.join(wrong)}")

    def _differs(self, runs: NDArray[np.int64], blocks: NDArray[np.int64]) -> bool:
        """Whether runs and blocks contradict each other; both are sums of rows, or of bytes. All runs have to end where
        all blocks end; those of a part have to lie inside."""
        end = int(runs[-1])
        return int(blocks[-1]) != end if self.is_whole else not 0 <= int(runs[0]) <= end <= int(blocks[-1])

    # -- what is inside ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Runs."""
        return len(self.runs)

    @property
    def nbytes(self) -> int:
        """Memory, roughly, for the budget of a cache."""
        tables = self.runs.nbytes + self.blocks.nbytes * 5 + self.pages.nbytes
        return len(self._page_bytes) + tables + 200 * len(self.queue_table) + 4096

    @property
    def page_bytes(self) -> bytes:
        """The stored column pages of its runs, one behind the other. Each is checked when it is decoded, or by
        ``check_pages``."""
        return self._page_bytes

    def check_pages(self) -> None:
        """Check the CRC32C of all column pages now. Raises CorruptionError."""
        view = memoryview(self._page_bytes)
        for page in self._pages:
            begin, end = int(self._page_offset[page]), int(self._page_offset[page + 1])
            stored = view[begin - self._pages_offset : end - self._pages_offset]
            if fastcrc.crc32.iscsi(stored) != int(self.pages["crc32c"][page]):
                raise CorruptionError(
                    f"{self.key}: column page [{self.tail_offset + begin}, {self.tail_offset + end}) fails its CRC32C"
                )

    @cached_property
    def queues(self) -> QueueSelection:
        """All queues, of runs and of parents."""
        return QueueRoster.of(self.topics, self.queue_table).first(len(self.queue_table))

    @cached_property
    def whole_runs(self) -> Table:
        """All runs as the catalog would name them (RUN_DTYPE)."""
        runs = np.zeros(len(self.runs), RUN_DTYPE)
        for name in RUN_DTYPE.names or ():
            runs[name] = self.runs[name]
        runs["ordinal"] = np.arange(len(runs))
        return runs

    def queue_of(self, run: int) -> QueueKey:
        """The queue whose rows ``run`` holds."""
        return self.queues[int(self.runs["queue"][run - self.first_run])]

    def check_run(self, run: np.void, queue: QueueKey) -> CatalogRun:
        """The part that ``run`` (RUN_DTYPE) of ``queue`` is. Raises CorruptionError unless the object holds it."""
        part = CatalogRun.of(run)
        self.check_part(part, int(run["kind"]), queue)
        return part

    def check_part(self, part: RunPart, kind: int, queue: QueueKey) -> None:
        """Raises CorruptionError unless the object holds ``part`` of ``queue``, as the catalog says."""
        ordinal = part.ordinal
        is_there = 0 <= ordinal - self.first_run < len(self.runs)
        if not is_there or self.queue_of(ordinal) != queue or not self._holds(part, kind):
            raise CorruptionError(
                f"{self.key}: run {ordinal} differs from the catalog's entry for {queue} at {part.base}"
            )

    def _holds(self, part: RunPart, kind: int) -> bool:
        """Whether ``part``, which the catalog describes as of this ``kind``, is the whole of its run or lies inside
        it."""
        own_kind, base, end, _, rows, base_byte, byte_count = _part_fields(
            self.runs[part.ordinal - self.first_run].item()
        )
        if own_kind == RunKind.SPARSE:
            base, end = part.base, part.end  # the catalog adds holes at both ends
        if part.rows == rows:
            whole = own_kind, base, end, base_byte, byte_count
            return part.first_row == 0 and whole == (
                kind,
                part.base,
                part.end,
                part.base_byte,
                part.byte_count,
            )
        is_inside = 0 <= part.first_row < part.first_row + part.rows <= rows
        is_inside &= base <= part.base < part.end <= end
        is_inside &= 0 <= part.base_byte - base_byte <= byte_count - part.byte_count and part.byte_count >= 0
        if own_kind not in (RunKind.BATCH, RunKind.SPARSE):  # their rows may span several offsets
            is_inside &= (part.base, part.end) == (base + part.first_row, base + part.first_row + part.rows)
        return bool(is_inside) and own_kind == kind

    def has_rows_of(self, part: RunPart) -> bool:
        """Whether the object has the run of ``part``, with its rows."""
        run = part.ordinal - self.first_run
        if not 0 <= run < len(self.runs):
            return False
        return 0 <= part.first_row <= part.first_row + part.rows <= int(self.runs["rows"][run])

    def _whole(self, run: int | RunPart) -> RunPart:
        """``run`` as a part: a number of a run of the object becomes the part with all its rows."""
        return (
            run
            if not isinstance(run, int)
            else CatalogRun.of(self.runs[run - self.first_run])._replace(ordinal=run)
        )

    def _extent(self, run: int | RunPart) -> tuple[int, int, int]:
        """Rows and raw bytes of the object before a run with bytes, or a part of one; and its own rows."""
        if isinstance(run, int):
            run -= self.first_run
            row = int(self._run_row[run])
            return row, int(self._run_raw[run]), int(self._run_row[run + 1]) - row
        ordinal = run.ordinal - self.first_run
        raw = int(self._run_raw[ordinal]) + run.base_byte - int(self._base_byte[ordinal])
        return int(self._run_row[ordinal]) + run.first_row, raw, run.rows

    def row_columns(self, run: int | RunPart) -> RowTable:
        """All rows of ``run``, or of a part of one. ``position`` is where a record begins in the bytes of ``run``; keys
        are not loaded (``decode_keys`` has them). Raises CorruptionError if the rows do not fill the run."""
        part = self._whole(run)
        number = part.ordinal - self.first_run
        first = int(self.first_row[number]) + part.first_row
        size, tags_code, stamp, phys, inner, parent, parent_offset = self._rows(first, first + part.rows)
        spans = inner.astype(np.int64)
        offsets = part.base + np.cumsum(spans) - spans
        sizes = size.astype(np.int64)
        kind = int(self.runs["kind"][number])
        is_lmq = kind == RunKind.LMQ
        if kind == RunKind.SPARSE:
            offsets = self._span_begin(part.ordinal, part.first_row) + np.cumsum(spans) - 1
            inner = np.ones(len(inner), np.int32)
            is_whole = part.base <= offsets[0] and offsets[-1] < part.end
        else:
            is_whole = part.base + int(spans.sum()) == part.end
        if not is_whole:
            raise CorruptionError(
                f"{self.key} is damaged: the rows of run {part.ordinal} do not reach the run's end offset"
            )
        if not is_lmq and int(sizes.sum()) != part.byte_count:
            raise CorruptionError(
                f"{self.key} is damaged: the messages of run {part.ordinal} have another size together than its footer "
                "says"
            )
        if is_lmq and int(parent.max(initial=-1)) >= len(self.queue_table):
            raise CorruptionError(
                f"{self.key} is damaged: an LMQ entry of run {part.ordinal} refers to a queue that its footer does not "
                "list"
            )
        position = np.full(len(size), -1, np.int64) if is_lmq else np.cumsum(sizes) - sizes
        key_count = np.zeros(len(size), np.uint16)
        return RowTable(
            position, size, tags_code, stamp, phys, offsets, inner, key_count, parent, parent_offset
        )

    def _span_begin(self, run: int, row: int) -> int:
        """The first of the queue offsets that ``row`` of a sparse run spans, which is in the hole before it, if there
        is one: the row before ends there."""
        base, first = int(self.runs["base_queue_offset"][run - self.first_run]), self.row_of(run)
        return base + (int(self._rows(first, first + row)[4].sum(dtype=np.int64)) if row else 0)

    def spans_begin(self, part: RunPart) -> int:
        """The first queue offset that the first row of ``part`` spans; of a sparse run that of the hole before it."""
        is_sparse = int(self.runs["kind"][part.ordinal - self.first_run]) == RunKind.SPARSE
        return self._span_begin(part.ordinal, part.first_row) if is_sparse else part.base

    def stored_columns(self, first_row: int, end_row: int) -> tuple[NDArray[Any], ...]:
        """Columns of rows [first_row, end_row) of the object, across runs: size, tags code, store timestamp, physical
        offset, queue offsets spanned (of sparse runs: with the hole before), parent, parent's queue offset."""
        if not int(self.first_row[0]) <= first_row < end_row <= int(self.first_row[-1]):
            raise ValueError(
                f"rows [{first_row}, {end_row}) are outside an object of {int(self.first_row[-1])} rows"
            )
        return self._rows(first_row, end_row)

    def columns_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Like ``stored_columns``, of ``rows``, which ascend."""
        first, end = int(rows[0]), int(rows[-1]) + 1
        if end - first == len(rows):
            return self._rows(first, end)
        page = np.searchsorted(self._page_row, rows, side="right") - 1
        numbers, at = np.unique(page, return_index=True)
        parts = np.split(rows - self._page_row[page], at[1:])
        columns = zip(*map(self._page, numbers.tolist()), strict=True)
        return tuple(
            np.concatenate([one[which] for one, which in zip(column, parts, strict=True)])
            for column in columns
        )

    def _rows(self, first: int, end: int) -> tuple[NDArray[Any], ...]:
        """The columns of rows [first, end), from as many column pages as they are in."""
        page = bisect_right(cast("Sequence[int]", self._page_row), first) - 1
        parts: list[tuple[NDArray[Any], ...]] = []
        while first < end:
            begin, last = int(self._page_row[page]), min(end, int(self._page_row[page + 1]))
            parts.append(tuple(column[first - begin : last - begin] for column in self._page(page)))
            first, page = last, page + 1
        if len(parts) == 1:
            return parts[0]
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def _page(self, page: int) -> Columns:
        return _decoded_pages.get(self._number, page, self._decoded_page)

    def _decoded_page(self, page: int) -> Columns:
        """Decompresses one column page and decodes it into read-only columns. Raises CorruptionError if its checksum,
        length or content is wrong."""
        begin, end = int(self._page_offset[page]), int(self._page_offset[page + 1])
        where = f"{self.key}: column page [{self.tail_offset + begin}, {self.tail_offset + end})"
        stored = memoryview(self._page_bytes)[begin - self._pages_offset : end - self._pages_offset]
        raw = expand_block(stored, self.pages[page], zstandard.ZstdDecompressor(), where)
        first, last = int(self._page_row[page]), int(self._page_row[page + 1])
        columns = tuple(np.empty(last - first, kind) for kind in COLUMN_KINDS)
        arguments: list[Any] = [*self._view.columns, *columns]
        if not decode_column_page(
            np.frombuffer(raw, np.uint8), first, last, self._view.run_at(first), *arguments
        ):
            raise CorruptionError(f"{where} does not decode")
        for column in columns:
            column.flags.writeable = False
        return columns

    # -- blocks -----------------------------------------------------------------------------------------------

    def block_span(
        self, run: int | RunPart, first_row: int, end_row: int, *, raw_bytes_max: int | None = None
    ) -> BlockSpan:
        """The blocks that hold rows [first_row, end_row) of ``run``, which is not empty and not of an LMQ; with
        ``raw_bytes_max`` only the first of them, up to the one that reaches so many bytes."""
        row_base, _, rows = self._extent(run)
        if not 0 <= first_row < end_row <= rows:
            raise ValueError(f"rows [{first_row}, {end_row}) are outside a run of {rows} rows")
        # Not numpy's searchsorted: taking the interpreter lock again costs more than the search.
        blocks = cast("Sequence[int]", self._block_row)
        first, end = bisect_right(blocks, row_base + first_row) - 1, bisect_left(blocks, row_base + end_row)
        if raw_bytes_max is not None:
            raw = cast("Sequence[int]", self._block_raw)
            end = max(first + 1, bisect_left(raw, raw[first] + raw_bytes_max, first, end))
        return self.span_of_blocks(run, first, end)

    def span_of_blocks(self, run: int | RunPart, first: int, end: int) -> BlockSpan:
        """Blocks [first, end) of the object, all of which hold rows of ``run``."""
        offset, raw = int(self._block_offset[first]), int(self._block_raw[first])
        row_base, raw_base, rows = self._extent(run)
        return BlockSpan(
            first,
            end,
            offset,
            int(self._block_offset[end]) - offset,
            max(0, int(self._block_row[first]) - row_base),
            min(rows, int(self._block_row[end]) - row_base),
            raw - raw_base,
            int(self._block_raw[end]) - raw,
        )

    def spans_of_single_blocks(self, run: int, numbers: Sequence[int]) -> list[BlockSpan]:
        """Like ``span_of_blocks``, a span for each of the blocks ``numbers``."""
        which = np.array(numbers)
        row_base, raw_base, rows = self._extent(run)
        bounds = (
            bound.tolist()
            for begins in (self._block_offset, self._block_row, self._block_raw)
            for bound in (begins[which], begins[which + 1])
        )
        return [
            BlockSpan(
                number,
                number + 1,
                offset,
                end - offset,
                max(0, row - row_base),
                min(rows, end_row - row_base),
                raw - raw_base,
                end_raw - raw,
            )
            for number, offset, end, row, end_row, raw, end_raw in zip(numbers, *bounds, strict=True)
        ]

    @property
    def block_offsets(self) -> NDArray[Any]:
        """Where each block begins in the object, and the end of the last."""
        return self._block_offset

    def bounds_of_blocks(self, run: int | RunPart, span: BlockSpan) -> tuple[list[int], list[int]]:
        """Begin of each block of ``span`` and end of the last: in rows from the span's first row, and in bytes."""
        first, end = span.first_block, span.end_block
        if end - first == 1:
            return [0, span.end_row - span.first_row], [0, span.raw_bytes]
        rows = self._block_row[first : end + 1] - (self._extent(run)[0] + span.first_row)
        rows[0], rows[-1] = 0, span.end_row - span.first_row  # both may hold rows of other runs too
        return rows.tolist(), (self._block_raw[first : end + 1] - self._block_raw[first]).tolist()

    def split_span(self, run: int | RunPart, span: BlockSpan, stored_bytes_max: int) -> list[BlockSpan]:
        """``span`` in pieces of at most so many stored bytes and SPAN_RAW_BYTES_MAX raw ones; a larger block is a piece
        of its own."""
        pieces = pairwise(self.cuts(span.first_block, span.end_block, stored_bytes_max))
        return [self.span_of_blocks(run, first, end) for first, end in pieces]

    def cuts(self, first: int, end: int, stored_bytes_max: int) -> list[int]:
        """Blocks [first, end) in pieces of at most so many stored bytes and SPAN_RAW_BYTES_MAX raw ones: the first
        block of each, and ``end``. A larger block is a piece of its own."""
        firsts = [first]
        while firsts[-1] < end:
            fitting = [
                int(np.searchsorted(starts, starts[firsts[-1]] + most, side="right")) - 1
                for starts, most in (
                    (self._block_offset, stored_bytes_max),
                    (self._block_raw, SPAN_RAW_BYTES_MAX),
                )
            ]
            firsts.append(max(min(*fitting, end), firsts[-1] + 1))
        return firsts

    def decode_blocks(self, span: BlockSpan, stored: bytes | memoryview) -> NDArray[np.uint8]:
        """The records of ``span``, back to back, from its stored bytes. Raises CorruptionError."""
        with memory_contained(f"{self.key}: [{span.offset}, {span.offset + span.length})"):
            memory = np.empty(span.raw_bytes, np.uint8)
        return self.decode_into(memory, span, stored)

    def decode_into(
        self, memory: NDArray[np.uint8], span: BlockSpan, stored: bytes | memoryview
    ) -> NDArray[np.uint8]:
        """Like ``decode_blocks``, but at the begin of ``memory``, which the caller uses again for the next span: page
        faults of fresh memory would take more than a third of a scan's processor time."""
        if len(stored) != span.length:
            raise CorruptionError(
                f"{self.key}: the read of [{span.offset}, {span.offset + span.length}) returned {len(stored)} bytes"
            )
        decompressor, view, filled = zstandard.ZstdDecompressor(), memoryview(stored), 0
        for block in range(span.first_block, span.end_block):
            begin, end = int(self._block_offset[block]), int(self._block_offset[block + 1])
            piece, row = view[begin - span.offset : end - span.offset], self.blocks[block]
            raw = memory[filled : filled + int(row["raw_bytes"])]
            expand_into(raw, piece, row, decompressor, self._name_of(block))
            filled += len(raw)
        return memory[:filled]

    def _name_of(self, block: int) -> str:
        begin, end = self._block_offset[block : block + 2].tolist()
        return f"{self.key}: block {block} [{begin}, {end})"

    def decode_each(
        self, blocks: Sequence[int], stored: Sequence[memoryview], decompressor: zstandard.ZstdDecompressor
    ) -> list[NDArray[np.uint8] | TieredError]:
        """The records of each of ``blocks`` from its stored bytes, or why they do not decode. Read-only; each has
        memory of its own (one buffer for all would be copied out again), but those stored raw are views."""
        found: list[NDArray[np.uint8] | TieredError] = []
        for block, piece in zip(blocks, stored, strict=True):
            try:
                raw = expand_block(piece, self.blocks[block], decompressor, self._name_of(block))
                found.append(np.frombuffer(raw, np.uint8))
            except TieredError as error:
                # Its traceback would keep the blocks in memory as long as the error is kept.
                found.append(error.with_traceback(None))
        return found

    # -- keys -------------------------------------------------------------------------------------------------

    @property
    def key_span(self) -> tuple[int, int]:
        """Offset and length of the key section."""
        return int(self._block_offset[-1]), self._stored_counts_bytes + 8 * self.key_count

    def decode_keys(self, stored: bytes | memoryview) -> KeySection:
        """Key hashes of all rows from the object's bytes of ``key_span``."""
        offset, length = self.key_span
        where = f"{self.key}: key section [{offset}, {offset + length})"
        rows = int(self._page_row[-1])
        if self.key_count == 0:
            with memory_contained(where):
                return KeySection(np.zeros(rows, np.uint16), np.zeros(0, np.uint64))
        if len(stored) != length or fastcrc.crc32.iscsi(stored) != self._keys_crc32c:
            raise CorruptionError(f"{where} fails its CRC32C")
        packed = memoryview(stored)[: self._stored_counts_bytes]
        counts = np.frombuffer(inflate(packed, 2 * rows, zstandard.ZstdDecompressor(), where), "<u2")
        if int(counts.sum(dtype=np.int64)) != self.key_count:
            raise CorruptionError(f"{where} has {self.key_count} hashes, which its counts do not add up to")
        hashes = np.frombuffer(stored, "<u8", offset=self._stored_counts_bytes)
        return KeySection(counts, hashes)


def _table(container: Container, name: str, dtype: np.dtype[Any]) -> Table:
    """The named table with the columns of ``dtype``; a newer minor version may have more."""
    stored = container.tables[name].dtype
    for field in dtype.names or ():
        if stored[field] != dtype[field]:
            raise ValueError(f"the column {name}.{field} is of type {stored[field]}, not {dtype[field]}")
    return container.table(name, dtype)


def _raw_differs(table: Table) -> bool:
    is_raw = table["codec"] == CODEC_RAW
    return bool((table["raw_bytes"][is_raw] != table["stored_bytes"][is_raw]).any())

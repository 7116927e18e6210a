"""Decodes the footer of a segment: the directory of its run groups, by which one of them is found. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import fastcrc
import numpy as np

from tiered.errors import CorruptionError, UnsupportedFormatError
from tiered.formats.container import Container, decode_container
from tiered.formats.memory_bound import memory_contained
from tiered.formats.segment import SegmentMeta
from tiered.formats.segment_layout import (
    FOOTER_KIND,
    GROUP_DTYPE,
    HEADER_BYTES,
    TRAILER_BYTES,
    decode_trailer,
)
from tiered.model.tables import Table, begins

DIRECTORY_BYTES, DIRECTORY_SHARE = 256 * 1024, 32
"""Last bytes of an object, and share of its tail, one of which has its directory, and mostly the run groups too."""

_COUNT_MAX = 1 << 40
_RUNS_MAX = 1 << 22
_GROUPS_MAX = 1 << 16
_HASH_BYTES = 8


class Before(NamedTuple):
    """How much of an object is before a run group. ``offset``: of the group's blocks."""

    runs: int
    rows: int
    block_rows: int
    raw_bytes: int
    blocks: int
    offset: int


def directory_span(size_bytes: int, tail_bytes: int) -> tuple[int, int]:
    """Offset and length of the bytes of an object that are read for its directory."""
    length = min(tail_bytes, max(DIRECTORY_BYTES, tail_bytes // DIRECTORY_SHARE))
    return size_bytes - length, length


class SegmentDirectory:
    """The footer of one segment, and the run groups that were read with it. Immutable; may be shared by threads."""

    def __init__(self, key: str, size_bytes: int, tail: bytes | memoryview) -> None:
        """``tail``: the last bytes of the object, from its footer or further ahead.

        Raises CorruptionError or UnsupportedFormatError.
        """
        self.key, self.size_bytes = key, size_bytes
        trailer = decode_trailer(tail, size_bytes, source=key)
        start = size_bytes - len(tail)
        if trailer.footer_offset < start:
            raise CorruptionError(
                f"{key}: the footer begins at {trailer.footer_offset}, only [{start}, …) was read"
            )
        footer = memoryview(tail)[trailer.footer_offset - start : len(tail) - TRAILER_BYTES]
        where = f"{key}: footer [{trailer.footer_offset}, {size_bytes - TRAILER_BYTES})"
        if fastcrc.crc32.iscsi(footer) != trailer.footer_crc32c:
            raise CorruptionError(f"{where} fails its CRC32C")
        container = decode_container(footer, FOOTER_KIND, source=where)
        self.version, self.tail_offset = trailer.version, trailer.tail_offset
        try:
            with memory_contained(key):
                self._load(container)
                self._check(trailer.footer_offset)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise CorruptionError(f"{where} is impossible: {error}") from error
        begin = max(start, self.tail_offset)
        self.page_bytes = bytes(tail[begin - start : trailer.footer_offset - start])
        """The last run groups, up to the footer. Each is checked when it is decoded."""

    def _load(self, container: Container) -> None:
        header = container.header
        if header.get("encryption") is not None or header.get("dictionaries"):
            raise UnsupportedFormatError(
                f"{self.key}: encrypted, or compressed with dictionaries", hint="upgrade this program"
            )
        meta = header["meta"]
        self.meta = SegmentMeta(
            **{name: meta[name] for name in SegmentMeta.__dataclass_fields__ if name in meta}
        )
        self.groups = group_table(container, "groups", GROUP_DTYPE)
        for name in GROUP_DTYPE.names or ():
            column = self.groups[name]
            if bool(((column < 0) | (column > _COUNT_MAX)).any()):
                raise ValueError(f"{name} of a run group")
        self._before = [begins(self.groups[name]) for name in Before._fields[:-1]]
        self._before.append(begins(self.groups["block_bytes"]) + HEADER_BYTES)
        hashes_bytes = _HASH_BYTES * self.groups["keys"].astype(np.int64)
        self.key_offset = begins(self.groups["key_counts_bytes"] + hashes_bytes) + self._before[-1][-1]
        """Where the keys of each group begin, and the end of the last."""
        self.offset = begins(self.groups["head_bytes"] + self.groups["page_bytes"]) + self.tail_offset
        """Where each group begins, and the end of the last."""

    def _check(self, footer_offset: int) -> None:
        wrong = [
            name
            for name, is_wrong in {
                "number of run groups": not 0 < len(self.groups) <= _GROUPS_MAX,
                "number of runs": int(self._before[0][-1]) > _RUNS_MAX,
                "length of blocks and keys": int(self.key_offset[-1]) != self.tail_offset,
                "length of run groups": int(self.offset[-1]) != footer_offset,
            }.items()
            if is_wrong
        ]
        if wrong:
            raise ValueError(", ".join(wrong))

    def __len__(self) -> int:
        """Run groups."""
        return len(self.groups)

    @property
    def nbytes(self) -> int:
        """Memory, roughly, for the budget of a cache."""
        return len(self.page_bytes) + 2 * self.groups.nbytes + 4096

    def group_of(self, ordinal: int) -> int:
        """The group of a run; ``len(self)`` if the object does not have it."""
        return bisect_right(cast("Sequence[int]", self._before[0]), ordinal) - 1

    def span_of(self, group: int) -> tuple[int, int]:
        """Offset and length of a group. Raises CorruptionError if the object does not have it."""
        if group >= len(self):
            raise CorruptionError(f"{self.key}: the catalog names runs that are not in it")
        begin = int(self.offset[group])
        return begin, int(self.offset[group + 1]) - begin

    def stored(self, group: int) -> memoryview | None:
        """The bytes of ``span_of(group)``, if they were read with the directory."""
        offset, length = self.span_of(group)
        begin = offset - (int(self.offset[-1]) - len(self.page_bytes))
        return memoryview(self.page_bytes)[begin : begin + length] if begin >= 0 else None

    def before(self, group: int) -> Before:
        """What is before a group."""
        return Before(*(int(column[group]) for column in self._before))


def group_table(container: Container, name: str, dtype: np.dtype[Any]) -> Table:
    """The named table with the columns of ``dtype``; a newer minor version may have more. Raises KeyError or
    ValueError."""
    found = container.tables[name].dtype
    for field in dtype.names or ():
        if found[field] != dtype[field]:
            raise ValueError(f"{name}.{field} is {found[field]}")
    return container.table(name, dtype)

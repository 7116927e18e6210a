"""One consume queue in files: what its units say, whether plain (tags perhaps in ``consumequeue_ext``) or BatchCQ.

A plain queue's broker may move tags codes to files in ``consumequeue_ext``. In place of tagsCode, a unit then has an
address, a number below -2^31: offset in these files + Long.MIN_VALUE. The entry there is {size 2, tagsCode 8, storeTime
8, bitmap length 2, bitmap}. The broker treats these files as disposable: an address without an entry stays as it is.

Sources: org.apache.rocketmq.store.ConsumeQueue, BatchConsumeQueue, ConsumeQueueExt.
"""

import os
import struct
from bisect import bisect_right
from pathlib import Path
from typing import Any, Final

import numpy as np

from tiered.consume_queue.index import UNIT_DTYPE, QueueKind, empty_units
from tiered.consume_queue.unit_files import OpenFiles, UnitFiles, is_filler
from tiered.errors import NotFoundError
from tiered.model.tables import Table
from tiered.residency import NAME_DIGITS, open_failure

ADDRESS_MAX: Final = -(2**31) - 1
LONG_MIN: Final = -(2**63)
_HEAD = struct.Struct(">hq")
_UNIT_BYTES_MIN: Final = 20


def resolve_tags_codes(tags_codes: Table, directory: Path, open_files: OpenFiles) -> Table:
    """``tags_codes`` of one queue, as 64-bit integers, with the true codes where the broker moved a code to a file of
    consumequeue_ext, in ``directory``, and left its address. An address without a code there stays."""
    addressed = np.flatnonzero(tags_codes <= ADDRESS_MAX)
    if len(addressed) == 0:
        return tags_codes
    files = _files(directory)
    if not files:
        return tags_codes
    resolved = tags_codes.copy()
    begins = [begin for begin, _ in files]
    for i in addressed.tolist():
        offset = int(tags_codes[i]) - LONG_MIN
        at = bisect_right(begins, offset) - 1
        if at >= 0 and (code := _read_code(open_files, files[at][1], offset - begins[at])) is not None:
            resolved[i] = code
    return resolved


def _files(directory: Path) -> list[tuple[int, Path]]:
    """The files of consumequeue_ext in ``directory``, each with the offset in its name, in their order; none if there
    is no directory."""
    try:
        names = [n for n in os.listdir(directory) if len(n) == NAME_DIGITS and n.isdecimal()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise open_failure(directory, error) from error
    return sorted((int(name), directory / name) for name in names)


def _read_code(open_files: OpenFiles, path: Path, offset: int) -> int | None:
    """The tags code at ``offset`` of the file ``path`` of consumequeue_ext; None if there is no entry."""
    head = bytearray(_HEAD.size)
    try:
        got = open_files.get(path).read_into(memoryview(head), offset)
    except NotFoundError:
        return None
    if got < _HEAD.size:
        return None
    size, code = _HEAD.unpack(head)
    return int(code) if size >= _UNIT_BYTES_MIN else None


PLAIN_DTYPE: Final = np.dtype([("phys", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
BATCH_DTYPE: Final = np.dtype([
    ("phys", ">i8"), ("size", ">i4"), ("tags_code", ">i8"), ("store_timestamp", ">i8"),
    ("base_offset", ">i8"), ("count", ">i2"), ("compacted_offset", ">i4"), ("reserved", ">i4"),
])  # fmt: skip
STORED_DTYPES: Final[dict[QueueKind, np.dtype[Any]]] = {
    QueueKind.PLAIN: PLAIN_DTYPE,
    QueueKind.BATCH: BATCH_DTYPE,
}


class FileQueue:
    """One queue's files, which are read without a trace. Not thread-safe."""

    __slots__ = ("_open_files", "_topic_ext", "files", "kind")

    def __init__(
        self, kind: QueueKind, topic: Path, name: str, topic_ext: Path, open_files: OpenFiles
    ) -> None:
        """``topic``, ``name``: as of UnitFiles; ``topic_ext``: the topic's directory in consumequeue_ext."""
        self.kind = kind
        self.files = UnitFiles(topic, name, STORED_DTYPES[kind], open_files)
        self._topic_ext = topic_ext
        self._open_files = open_files

    def read(self, first: int, count: int) -> Table:
        """The valid units of the ``count`` from index ``first`` on, as a table of UNIT_DTYPE, whichever kind of queue
        it is."""
        stored, indices = self.files.read(first, count)
        units = np.zeros(len(stored), UNIT_DTYPE)
        units["phys"], units["size"] = stored["phys"], stored["size"]
        if self.kind is QueueKind.BATCH:
            units["tags_code"] = stored["tags_code"]
            units["queue_offset"], units["inner_num"] = stored["base_offset"], stored["count"]
            units["store_timestamp"] = stored["store_timestamp"]
        else:
            codes = stored["tags_code"].astype(np.int64)
            ext = self._topic_ext / Path(self.files.directory).name
            units["tags_code"] = resolve_tags_codes(codes, ext, self._open_files)
            units["queue_offset"], units["inner_num"] = indices, 1
        return units

    def stored(self, units: Table) -> Table:
        """``units``, a table of UNIT_DTYPE, in the form in which files of this kind of queue store them."""
        stored = np.zeros(len(units), STORED_DTYPES[self.kind])
        for name in ("phys", "size", "tags_code"):
            stored[name] = units[name]
        if self.kind is QueueKind.BATCH:
            stored["base_offset"], stored["count"] = units["queue_offset"], units["inner_num"]
            stored["store_timestamp"], stored["compacted_offset"] = units["store_timestamp"], -1
        return stored

    def end_phys(self) -> int:
        """Physical end of the last unit's record, 0 without any."""
        last = self.last_record()
        return sum(last) if last is not None else 0

    def has_places(self) -> bool:
        """Whether its files contain anything, including fillers."""
        return self.files.end() > self.files.first

    def has_units(self) -> bool:
        """Whether its files contain a unit that is no filler."""
        return self.last_record() is not None

    def last(self) -> Table:
        end = self.files.end()
        return self.read(end - 1, 1) if end > self.files.first else empty_units()

    def last_record(self) -> tuple[int, int] | None:
        """(phys, size) of the last unit's record."""
        return self.record_of(self.files.tail()[1])

    def record_of(self, last: Table) -> tuple[int, int] | None:
        """(phys, size) of the record of a queue's last stored unit."""
        if len(last) == 0 or is_filler(last)[0]:
            return None
        return int(last["phys"][0]), int(last["size"][0])

    def max_offset(self) -> int:
        """One past the last queue offset."""
        end, last = self.files.tail()
        if self.kind is QueueKind.PLAIN:
            return end
        return int(last["base_offset"][0] + last["count"][0]) if self.record_of(last) is not None else 0

    def min_offset(self, min_phys: int) -> int:
        """The queue offset of the first unit whose record begins at or above physical offset ``min_phys``; the maximum
        if there is none."""
        index = self.files.lower_bound("phys", min_phys)
        if self.kind is QueueKind.PLAIN:
            return index
        unit = self.read(index, 1)
        return int(unit["queue_offset"][0]) if len(unit) else self.max_offset()

    def index_of(self, queue_offset: int) -> int:
        """The index of the unit that contains ``queue_offset``, or of the first one after it. A unit of a BatchCQ
        contains several offsets."""
        if self.kind is QueueKind.PLAIN:
            return max(queue_offset, self.files.first)
        after = self.files.lower_bound("base_offset", queue_offset + 1)
        before = self.read(after - 1, 1) if after > self.files.first else empty_units()
        holds = len(before) and before["queue_offset"][0] + before["inner_num"][0] > queue_offset
        return after - 1 if holds else after

"""Fixed-size units in a sequence of files: the storage of plain and batch consume queues.

Files are named by their first byte's offset in 20 digits; the last ones may be blank partly or wholly. A unit is valid
if its offset is not negative and its size positive; the first invalid one ends the queue. A first file created at an
offset above 0 is filled with {0, 0x7FFFFFFF} filler units. Sources: org.apache.rocketmq.store.ConsumeQueue,
BatchConsumeQueue.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tiered.errors import NotFoundError
from tiered.model.lru import Lru
from tiered.model.tables import Table
from tiered.residency import NAME_DIGITS, ColdReadFile, open_failure

FILLER_SIZE: Final = 0x7FFFFFFF
GALLOP_UNITS: Final = 64
"""Units that the first step of a search for new units reads; each further step reads twice as many."""
HOLE_UNITS: Final = 256
"""The queue's end is among so many units before a file's first hole, as a hole begins at a page of 4 KiB."""


class UnitFile(NamedTuple):
    """One file: units [first, first + units)."""

    first: int
    units: int
    path: Path


class OpenFiles:
    """A bounded LRU of open queue files. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self._open: Lru[Path, ColdReadFile] = Lru(limit)

    def get(self, path: Path) -> ColdReadFile:
        """The open file at ``path``. Raises as ColdReadFile does."""
        opened = self._open.get(path)
        if opened is None:
            opened = ColdReadFile(path)
            _close(self._open.add(path, opened))
        return opened

    def forget(self, path: Path) -> None:
        """Close the descriptor of ``path``: the file is gone or replaced."""
        opened = self._open.pop(path)
        if opened is not None:
            opened.close()

    def close(self) -> None:
        """Close all."""
        _close(self._open.evict(len(self._open)))


def _close(files: Iterable[ColdReadFile]) -> None:
    for file in files:
        file.close()


class UnitFiles:
    """The files of one queue. ``dtype`` is the big-endian unit and has fields ``phys`` and ``size``."""

    __slots__ = ("_dtype", "_end", "_listed", "_listed_end", "_name", "_open_files", "_topic")

    def __init__(self, topic: Path, name: str, dtype: np.dtype[Any], open_files: OpenFiles) -> None:
        """``name``: of the queue's directory in that of its ``topic``; ``dtype``: the type of a unit as it is stored;
        ``open_files`` limits how many files of all queues are open. The directory is listed when it is first needed."""
        self._topic, self._name = topic, name
        self._dtype = dtype
        self._open_files = open_files
        self._listed: list[UnitFile] | None = None
        self._end = 0
        """One past the last valid unit at the last look, where the next one begins to search."""
        self._listed_end = 0
        """``_end`` if it was found in the files that are listed now; 0 if they have not been searched yet."""

    @property
    def directory(self) -> str:
        """The queue's directory, as text that is made when it is needed: there may be 100,000 queues."""
        return f"{self._topic}/{self._name}"

    @property
    def _files(self) -> list[UnitFile]:
        """Listed when first needed: most of 100,000 queues are never read."""
        if self._listed is None:
            self._listed = self._list()
        return self._listed

    @property
    def is_listed(self) -> bool:
        """Whether the directory was listed since ``refresh``."""
        return self._listed is not None

    def refresh(self) -> None:
        """List the directory again when next needed."""
        # A recreated topic has different files of the same names.
        self.forget()
        self._listed = None
        self._listed_end = 0

    def _list(self) -> list[UnitFile]:
        """The files in the queue's directory, by first unit; none if there is no directory. Raises an error naming it
        if it cannot be listed."""
        unit_bytes = self._dtype.itemsize
        found = []
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    if len(entry.name) == NAME_DIGITS and entry.name.isdecimal():
                        units = entry.stat().st_size // unit_bytes
                        found.append(UnitFile(int(entry.name) // unit_bytes, units, Path(entry.path)))
        except (FileNotFoundError, NotADirectoryError):
            found = []
        except OSError as error:
            raise open_failure(Path(self.directory), error) from error
        return sorted(found)

    def forget(self) -> None:
        """Close the open files of this queue."""
        for file in self._listed or ():
            self._open_files.forget(file.path)

    @property
    def listed(self) -> tuple[UnitFile, ...]:
        """The files, by first unit."""
        return tuple(self._files)

    @property
    def first(self) -> int:
        """Index of the first unit of the files, valid or not."""
        return self._files[0].first if self._files else 0

    def end(self) -> int:
        """One past the last valid unit. Cheap when little has changed since the last call."""
        return self.tail()[0]

    def tail(self) -> tuple[int, Table]:
        """One past the index of the last valid unit, and that unit; an empty table if there is none. It looks at first
        where the end was at the last call, as little has changed since then."""
        last = self._follow(self._end - 1) if self._end > self.first else self._none()
        if len(last) == 0:
            # Not searched yet, empty, or truncated and rewritten.
            self._end, last = self._search_tail()
        self._listed_end = self._end
        return self._end, last

    def _follow(self, index: int) -> Table:
        """Read valid units from ``index`` on, in steps that double, and set ``_end`` behind them. Returns the last of
        them; an empty table if the one at ``index`` is not valid. A file that the broker has made since the listing is
        found."""
        last, count = self._none(), GALLOP_UNITS
        while len(units := self._valid(index, count)):
            index += len(units)
            self._end, last = index, units[-1:]
            is_file_full = index == self._file_end(index - 1)
            if len(units) < count and not is_file_full:
                break
            if is_file_full and index == self._file_end(self._files[-1].first):
                self._add_next_file(index)
            count *= 2
        return last

    def _add_next_file(self, first: int) -> None:
        """Add the file whose first unit has the index ``first``, behind the last known one, if the broker has made
        it."""
        path = Path(self.directory) / f"{first * self._dtype.itemsize:0{NAME_DIGITS}d}"
        try:
            units = path.stat().st_size // self._dtype.itemsize
        except OSError:
            # Missing or unreadable: reading it will report which.
            return
        if units:
            self._files.append(UnitFile(first, units, path))

    def read(self, first: int, count: int) -> tuple[Table, Table]:
        """Read the ``count`` units from index ``first`` on. Returns those that are valid and no fillers, and their
        indices."""
        indices, parts = [], []
        last = first + count
        if last > self._listed_end:
            last = min(last, self.end())
        for file in self._files:
            begin, end = max(first, file.first), min(last, file.first + file.units)
            if begin < end:
                units = self._raw(file, begin, end - begin)
                index = np.arange(begin, begin + len(units))
                keep = (units["phys"] >= 0) & (units["size"] > 0) & ~is_filler(units)
                parts.append(units[keep])
                indices.append(index[keep])
        if not parts:
            return self._none(), np.zeros(0, np.int64)
        return np.concatenate(parts), np.concatenate(indices)

    def lower_bound(self, field: str, value: int) -> int:
        """The index of the first valid unit whose ``field`` is at least ``value``, by bisection, as the field never
        decreases; the queue's end if there is none."""
        end = self.end()
        files = [file for file in self._files if file.first < end]
        # Bisect over files by their first real unit, then inside the file before.
        i = bisect_left(files, value, key=lambda file: self._at(file.first, field, file))
        if i == 0:
            return files[0].first if files else end
        file = files[i - 1]
        inside = range(file.first, min(file.first + file.units, end))
        found = bisect_left(inside, value, key=lambda index: self._at(index, field, file))
        if found < len(inside):
            return inside[found]
        return files[i].first if i < len(files) else end

    def _at(self, index: int, field: str, file: UnitFile) -> int:
        """The ``field`` of the unit at ``index``, which is in ``file``; -1 for a filler, or if there is no unit."""
        unit = self._raw(file, index, 1)
        return -1 if len(unit) == 0 or is_filler(unit)[0] else int(unit[field][0])

    def _search_tail(self) -> tuple[int, Table]:
        """One past the index of the last valid unit, and that unit, searched from the last file on."""
        for file in reversed(self._files):
            end, last = self._search_tail_in(file)
            if end > file.first:
                return end, last
        return self.first, self._none()

    def _search_tail_in(self, file: UnitFile) -> tuple[int, Table]:
        """One past the index of the last valid unit of ``file``, and that unit; its first index and an empty table if
        it has none. The last unit is mostly just before the file's first hole; otherwise it is found by bisection."""
        unit_bytes = self._dtype.itemsize
        try:
            hole = self._open_files.get(file.path).first_hole()
        except NotFoundError:
            return file.first, self._none()
        written = min(file.units, -(-hole // unit_bytes))
        first = file.first + max(written - HOLE_UNITS, 0)
        before_hole = self._leading_valid(self._raw(file, first, file.first + written - first))
        if len(before_hole) or first == file.first:
            return first + len(before_hole), before_hole[-1:]
        inside = range(file.first, first)
        end = file.first + bisect_left(inside, True, key=partial(self._is_blank, file))
        return end, self._raw(file, end - 1, 1) if end > file.first else self._none()

    def _is_blank(self, file: UnitFile, index: int) -> bool:
        """Whether no valid unit is at ``index``, which is in ``file``."""
        unit = self._raw(file, index, 1)
        return len(unit) == 0 or bool(unit["phys"][0] < 0 or unit["size"][0] <= 0)

    def _valid(self, first: int, count: int) -> Table:
        """The valid units from index ``first`` up to the first invalid one; at most ``count``, and only those in the
        same file."""
        file = self._file_of(first)
        if file is None:
            return self._none()
        return self._leading_valid(self._raw(file, first, min(count, file.first + file.units - first)))

    def _leading_valid(self, units: Table) -> Table:
        invalid = np.flatnonzero((units["phys"] < 0) | (units["size"] <= 0))
        return units[: invalid[0]] if len(invalid) else units

    def _none(self) -> Table:
        return np.zeros(0, self._dtype)

    def _file_of(self, index: int) -> UnitFile | None:
        """The file with the unit at ``index``, valid or not; None: there is none."""
        i = bisect_right(self._files, index, key=lambda file: file.first) - 1
        if i < 0 or index >= self._files[i].first + self._files[i].units:
            return None
        return self._files[i]

    def _file_end(self, index: int) -> int:
        """One past the index of the last unit of the file that has the one at ``index``; ``index`` without a file."""
        file = self._file_of(index)
        return file.first + file.units if file is not None else index

    def _raw(self, file: UnitFile, first: int, count: int) -> Table:
        """The ``count`` units of ``file`` from index ``first`` on, valid or not; fewer at the file's end, and none if
        the broker has deleted it."""
        unit_bytes = self._dtype.itemsize
        data = bytearray(count * unit_bytes)
        try:
            opened = self._open_files.get(file.path)
            got = opened.read_into(memoryview(data), (first - file.first) * unit_bytes)
        except NotFoundError:
            return self._none()
        return np.frombuffer(data, self._dtype, got // unit_bytes)


def is_filler(units: Table) -> Table:
    """Which units are fillers at the begin of a file."""
    filler: Table = (units["size"] == FILLER_SIZE) & (units["phys"] == 0)
    return filler

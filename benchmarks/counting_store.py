"""A store for synthetic histories: counts requests, and keeps content in one file, so that the process has the memory
of writer and readers."""

import json
import os
import resource
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from weakref import finalize

from benchmarks.synthetic_history import CYCLE_MS, START_MS
from tiered.errors import AlreadyExistsError, NotFoundError
from tiered.formats.keys import CATALOG_PREFIX, catalog_key, parse_catalog_key
from tiered.object_store.interface import GET_BYTES_MAX, Body, ObjectInfo
from tiered.object_store.memory import MemoryStore


class CountingStore(MemoryStore):
    """Keys are sorted when they are listed. ``directory`` keeps the history for later measurements; default: none
    does."""

    def __init__(self, directory: Path | None = None) -> None:
        self.reads = self.listed = self.puts = self.put_bytes = self.peak_rss_bytes = 0
        self.data_bytes = 0
        """Of the data objects of the history, which are not here."""
        self.newest: int | None = None
        """The newest version that readers see; None: all."""
        self._commits = array("q")  # bytes of version n + 1, at n
        self._begins = array("q")
        self._others: dict[str, tuple[int, int]] = {}
        self._names = None if directory is None else directory / "names.json"
        if directory is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the store
        else:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = (directory / "content").open("a+b")
        finalize(self, self._file.close)
        if self._names is not None and self._names.exists():
            begins, commits, others, self.put_bytes, self.data_bytes = json.loads(self._names.read_bytes())
            self._begins.extend(begins)
            self._commits.extend(commits)
            self._others = {key: (begin, length) for key, (begin, length) in others.items()}
        os.ftruncate(self._file.fileno(), self.put_bytes)
        super().__init__()

    def keep(self) -> None:
        """Write where each object is, if there is a directory for it."""
        if self._names is not None:
            places = [
                self._begins.tolist(),
                self._commits.tolist(),
                self._others,
                self.put_bytes,
                self.data_bytes,
            ]
            self._names.write_text(json.dumps(places))

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        content = b"".join(body)
        begin = self.put_bytes
        version = parse_catalog_key(key)
        if self._place(key) is not None:
            raise AlreadyExistsError(f"{key} exists")
        if version is None:
            self._others[key] = begin, len(content)
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes())  # pages are put during merges
        else:
            assert version == len(self._begins) + 1
            self._begins.append(begin)
            self._commits.append(len(content))
        os.write(self._file.fileno(), content)  # at its end
        self.puts += 1
        self.put_bytes += len(content)

    def _place(self, key: str) -> tuple[int, int] | None:
        version = parse_catalog_key(key)
        if version is None:
            return self._others.get(key)
        return (self._begins[version - 1], self._commits[version - 1]) if version <= self._head else None

    @property
    def _head(self) -> int:
        return len(self._begins) if self.newest is None else self.newest

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        self.reads += 1
        begin, length = self._found(key)
        return os.pread(self._file.fileno(), length, begin)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.reads += 1
        begin, size = self._found(key)
        assert 0 <= offset <= offset + length <= size
        return os.pread(self._file.fileno(), length, begin + offset)

    def _found(self, key: str) -> tuple[int, int]:
        place = self._place(key)
        if place is None:
            raise NotFoundError(f"{key} does not exist")
        return place

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        self.listed += 1
        if prefix.startswith(CATALOG_PREFIX):
            wanted, after = parse_catalog_key(prefix), parse_catalog_key(start_after)
            newest = self._head if wanted is None else wanted
            versions = range(newest if after is None else min(newest, after - 1), 0, -1)
            keys: Iterator[str] = map(catalog_key, versions)
        else:
            names = sorted(key for key in self._others if key.startswith(prefix))
            keys = iter(names[bisect_right(names, start_after) :])
        return (
            ObjectInfo(key, self._found(key)[1], START_MS + CYCLE_MS * (parse_catalog_key(key) or 0))
            for key in islice(keys, limit)
        )

    def name(self, key: str, size_bytes: int) -> None:
        """List an object without content."""
        self._others[key] = 0, size_bytes


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()

"""PyIceberg's files through the object store of the export, so that one client with one configuration writes all."""

from __future__ import annotations

import io
from typing import Any

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from rocketmq_tiered.export.parquet_parts import write_file
from tiered.errors import NotFoundError, UsageError
from tiered.object_store.interface import ObjectStore

STORE, PLACE = "tiered.store", "tiered.place"
"""Properties of the catalog: the object store at the table's place, and the URL of that."""
READ_BYTES = 1 << 20


class StoreFiles(FileIO):
    """Files below ``PLACE``, which are objects of ``STORE``. Its methods raise UsageError for a file elsewhere."""

    def new_input(self, location: str) -> InputFile:
        """A file to read."""
        return self._file(location)

    def new_output(self, location: str) -> OutputFile:
        """A file to write."""
        return self._file(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file."""
        self._file(location if isinstance(location, str) else location.location).delete()

    def _file(self, location: str) -> _StoredFile:
        place = f"{self.properties[PLACE]}/"
        if not location.startswith(place):
            hint = "export to its place, or give another --table"
            raise UsageError(f"the table is elsewhere: {location} is not below {place}", hint=hint)
        return _StoredFile(self.properties[STORE], location, location.removeprefix(place))


class _StoredFile(InputFile, OutputFile):
    def __init__(self, store: ObjectStore, location: str, key: str) -> None:
        super().__init__(location)
        self._store, self._key = store, key

    def _sizes(self) -> list[int]:
        """Its size; empty: it does not exist."""
        return [info.size_bytes for info in self._store.list(self._key, limit=1) if info.key == self._key]

    def __len__(self) -> int:
        for size_bytes in self._sizes():
            return size_bytes
        raise NotFoundError(
            f"{self.location} does not exist",
            hint="the Iceberg table refers to this file: put it back, or export to a new table",
        )

    def exists(self) -> bool:
        """Whether it can be read."""
        return bool(self._sizes())

    def open(self, seekable: bool = True) -> InputStream:
        """A reader of its bytes, which requests them in ranges."""
        return io.BufferedReader(_Reader(self._store, self._key, len(self)), READ_BYTES)

    def delete(self) -> None:
        """Delete it."""
        self._store.delete([self._key])

    def to_input_file(self) -> InputFile:
        """The same file."""
        return self

    def create(self, overwrite: bool = False) -> OutputStream:
        """Collects its bytes, and writes them when it is closed without an error. No file is replaced."""
        return _Writer(self._store, self._key)


class _Reader(io.RawIOBase):
    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store, self._key, self._size, self._at = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._at))
        buffer[:length] = self._store.get_range(self._key, self._at, length)
        self._at += length
        return length


class _Writer(io.BytesIO):
    def __init__(self, store: ObjectStore, key: str) -> None:
        super().__init__()
        self._store, self._key = store, key

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            super().close()
        self.close()

    def close(self) -> None:
        if not self.closed:
            write_file(self._store, self._key, self.getvalue())
        super().close()

"""Opens a broker's RocksDB without modifying it: from a private directory of links or copies.

The library writes into the directory it opens, even read-only. So small files are copied; table files, which never
change, are copied while the broker may delete them (it runs), else linked symbolically.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tiered.errors import UnavailableError
from tiered.residency import open_failure

ATTEMPTS_MAX: Final = 5
_TABLE_SUFFIX: Final = ".sst"
_SKIPPED: Final = ("LOCK", "LOG", "rocksdict-config.json")


def is_rocksdb(directory: Path) -> bool:
    """Whether ``directory`` is a RocksDB."""
    return (directory / "CURRENT").is_file()


class RocksdbCopy:
    """A broker's RocksDB, read-only, as of now. Close it to remove the private directory."""

    def __init__(self, directory: Path, *, link_tables: bool) -> None:
        """Copy the database in ``directory`` to a private directory and open the copy. ``link_tables``: link its table
        files instead, which stay as no broker runs. Raises AccessDeniedError, and UnavailableError if the database
        changes faster than it can be copied."""
        self.directory = directory
        self._private = tempfile.TemporaryDirectory(prefix="tiered-rocksdb-")
        try:
            self._db, self._families = self._open(link_tables)
        except BaseException:
            self._private.cleanup()
            raise

    def items(self, family: str = "default", *, from_key: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a column family in key order; nothing when there is no such family."""
        if family in self._families:
            yield from self._families[family].items(from_key=from_key or None)

    def close(self) -> None:
        """Close the database and remove the private directory."""
        self._families = {}
        self._db.close()
        self._private.cleanup()

    def __enter__(self) -> RocksdbCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, link_tables: bool) -> tuple[Any, dict[str, Any]]:
        """Copy the database and open the copy, which is repeated if the broker has removed a file while it was copied.
        Returns the database and its column families by name."""
        problem = ""
        for attempt in range(ATTEMPTS_MAX):
            target = Path(self._private.name) / str(attempt)
            try:
                _copy(self.directory, target, link_tables)
                return _open_read_only(target)
            except FileNotFoundError as error:
                problem = f"its file {error.filename} was removed while it was copied"
            except OSError as error:
                raise open_failure(self.directory, error) from error
            except Exception as error:  # the library raises plain Exception
                problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnavailableError(
            f"RocksDB {self.directory} cannot be opened: {problem}",
            hint="try again while the broker is less busy",
        )


def _copy(source: Path, target: Path, link_tables: bool) -> None:
    """Copy the files of the RocksDB in ``source`` to ``target``, except for its lock and logs. ``link_tables``: make
    links to its table files instead of copying them."""
    target.mkdir()
    # The manifest first: it names the tables, which must still exist when copied.
    for path in sorted(source.iterdir(), key=lambda path: path.suffix == _TABLE_SUFFIX):
        if path.name.startswith(_SKIPPED) or not path.is_file():
            continue
        if link_tables and path.suffix == _TABLE_SUFFIX:
            (target / path.name).symlink_to(path.resolve())
        else:
            shutil.copyfile(path, target / path.name)


def _open_read_only(directory: Path) -> tuple[Any, dict[str, Any]]:
    """Open the RocksDB in ``directory`` for reading. Returns it and all its column families by name: the names differ
    between versions of the broker."""
    # Slow to import, and most stores do not need it.
    from rocksdict import AccessType, Options, Rdict

    path = str(directory)
    names = Rdict.list_cf(path, Options(raw_mode=True))
    options = {name: Options(raw_mode=True) for name in names}
    database = Rdict(
        path, Options(raw_mode=True), column_families=options, access_type=AccessType.read_only()
    )
    return database, {name: database.get_column_family(name) for name in names}

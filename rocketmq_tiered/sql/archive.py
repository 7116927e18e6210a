"""The archive that users open: reading by queue (fetcher/archive.py), and topics as tables and SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

import fetcher.archive
from fetcher.access import ArchiveAccess
from rocketmq_tiered import sql as tables
from tiered.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation

    from rocketmq_tiered.sql.session import Parameters


class Archive(fetcher.archive.Archive):
    """One broker's archive. Threads may share it. Close it, or use it as a context manager: then names and
    bounds stay available, and reads raise UsageError."""

    def __init__(self, access: ArchiveAccess) -> None:
        super().__init__(access)
        self._session: tables.SqlSession | None = None
        self._lock = Lock()

    def close(self) -> None:
        """Release threads, connections and temporary files. Idempotent."""
        if self._session is not None:
            self._session.close()
        super().close()

    def topic(self, name: str) -> tables.Topic:
        """A topic as a table. Raises NotFoundError. Needs ``rocketmq-tiered[sql]``, as ``sql`` does."""
        if name not in self.topics():
            raise NotFoundError(f"{self.title} has no topic {name}", hint="tiered ls lists the topics")
        with extra():
            return tables.Topic(self.access, name)

    def sql(self, statement: str, parameters: Parameters = None) -> DuckDBPyRelation:
        """The result of a statement on the topics, as DuckDB's relation (``.df()``, ``.pl()``, ``.fetchall()``).
        Statements of one thread share temporary tables. Raises UsageError."""
        return self.session().query(statement, parameters)

    def session(self, **options: bool) -> tables.SqlSession:
        """The archive's SQL session: DuckDB, in which each topic is a table. The first call may give ``options``, which
        are those of SqlSession. Raises UsageError if DuckDB is not installed, or for options in a later call."""
        self.access.require_open()
        with extra(), self._lock:
            if self._session is not None and options:
                raise UsageError(
                    "this archive already has an SQL session, and its options cannot be changed",
                    hint="call session(…) with options before sql(…) or another session(…)",
                )
            self._session = self._session or tables.SqlSession(self.access, **options)
        return self._session


open_archive = Archive.open


@contextmanager
def extra() -> Iterator[None]:
    """Turns a missing package into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed", hint="pip install 'rocketmq-tiered[sql]'"
        ) from error

"""DuckDB on one archive: each topic a view. Owns the connections, one a thread, their limits, and the spill directory.

No statement can change the archive, which DuckDB sees only through scans. Statements may read and write local files, as
the user who runs them.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from threading import Lock, local
from typing import Any
from weakref import WeakSet

import duckdb

from fetcher.access import ArchiveAccess
from rocketmq_tiered.sql.topic import Topic, TopicDataset
from tiered.errors import NotFoundError, TieredError, UsageError

logger = logging.getLogger(__name__)

MEMORY_BYTES = 512 << 20
"""Memory of DuckDB. Joins, groups and sorts spill to a temporary directory above a quarter of it, which leaves room to
merge what they spilled: a sort of 500,000 messages of 1 KiB fails with half of it, or without that bound."""
THREADS_MAX = 2
Parameters = Sequence[Any] | Mapping[str, Any] | None
"""Of a statement: for ``?`` and ``$1``, or for ``$name``."""
_LISTS_TABLES = re.compile(r"show|pragma|_schema|duckdb_|pg_|sqlite_")
_NO_TABLE = re.compile(r"Table with name (.+?) does not exist")


@dataclass(eq=False)
class _Cursor:
    """A thread's connection, which topics it has as views, and what a scan for it raised."""

    connection: duckdb.DuckDBPyConnection
    views: set[str] = field(default_factory=set)
    failure: TieredError | None = None

    def failed(self, error: TieredError) -> None:
        self.failure = error


class SqlSession:
    """Statements on the topics of one archive, from any threads, which share tables but temporary ones. Close it before
    the archive; then its relations fail."""

    def __init__(self, access: ArchiveAccess) -> None:
        self._access, self._version = access, -1
        self._spill = tempfile.TemporaryDirectory(prefix="tiered-sql-")
        self._lock, self._local = Lock(), local()
        self._database = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": f"{MEMORY_BYTES >> 20}MiB",
                "threads": str(min(len(os.sched_getaffinity(0)), THREADS_MAX)),
                "temp_directory": str(Path(self._spill.name)),
                "preserve_insertion_order": "false",  # it would keep whole results of COPY in memory
                "python_enable_replacements": "false",  # no variable of this program is a table
                "autoinstall_known_extensions": "false",  # nothing is downloaded
                "autoload_known_extensions": "false",
            },
        )
        self._names: dict[str, str] = {}
        """Topic of each name in lower case."""
        self._tables: dict[str, str] = {}
        """Topic of each table."""
        self._cursors = WeakSet[_Cursor]()
        """Of threads that live."""

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """The thread's connection of DuckDB with all topics, for programs that need more than this class offers."""
        return self._named("show").connection

    def execute(self, statement: str | duckdb.Statement) -> duckdb.DuckDBPyConnection:
        """Run a statement, whose rows are then fetched; those of the one before are not."""
        self._own().connection.abort()
        return self._named(statement).connection.execute(statement)

    def _own(self) -> _Cursor:
        """The thread's. Views and settings are a connection's."""
        own: _Cursor | None = getattr(self._local, "cursor", None)
        if own is None:
            own = self._local.cursor = _Cursor(self._database.cursor())
            own.connection.execute(
                f"SET TimeZone = 'UTC'; SET operator_memory_limit = '{MEMORY_BYTES >> 22}MiB'"
            )
            self._cursors.add(own)
        return own

    def _named(self, statement: str | duckdb.Statement) -> _Cursor:
        """With views of the topics whose names are in ``statement``, or of all if it may list tables: there may be
        100,000s."""
        text, own = (statement if isinstance(statement, str) else statement.query).lower(), self._own()
        with self._lock:
            self._note_topics()
            lists, names = _LISTS_TABLES.search(text), self._tables.keys() - own.views
            views = [name for name in names if lists or name.lower().replace('"', '""') in text]
        for name in views:
            own.connection.register(name, TopicDataset(Topic(self._access, self._tables[name]), own.failed))
            own.views.add(name)
        return own

    def _note_topics(self) -> None:
        """Name the topics that are new."""
        if self._access.state.version == self._version:
            return
        known, self._version = set(self._tables.values()), self._access.state.version
        for topic in (one for one in self._access.topics() if one not in known):
            same = self._names.setdefault(topic.lower(), topic)  # names differ in more than case
            name = topic if same == topic else f"{topic} {len(self._names)}"
            if name != topic:
                logger.warning('topic %s is table "%s", as SQL does not tell it from %s', topic, name, same)
            self._tables[name] = topic

    def close(self) -> None:
        """Release memory and temporary files. Idempotent."""
        for connection in (*(one.connection for one in self._cursors), self._database):
            connection.close()
        self._spill.cleanup()

    def statements(self, text: str) -> list[duckdb.Statement]:
        """The statements of ``text``. Raises UsageError for what is not SQL."""
        with self.errors():
            return self._own().connection.extract_statements(text)

    def query(
        self, statement: str | duckdb.Statement, parameters: Parameters = None
    ) -> duckdb.DuckDBPyRelation | None:
        """The result, read when it is fetched, with ``parameters`` at once; None of a statement without one. Raises as
        ``errors``."""
        with self.errors():
            return self._named(statement).connection.sql(statement, params=parameters)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """DuckDB's errors as this program's: what reading the archive raised, NotFoundError for a topic, UsageError."""
        self._own().failure = None
        try:
            yield
        except RuntimeError as error:
            if str(error) != "Query interrupted":
                raise
            raise KeyboardInterrupt from error
        except duckdb.Error as error:
            raise self._error_of(error) from error

    def _error_of(self, error: duckdb.Error) -> TieredError:
        if (failure := self._own().failure) is not None:
            return failure
        text = str(error)
        topics = self._access.topics()
        if (missing := _NO_TABLE.search(text)) is not None:
            close = get_close_matches(missing[1], topics)
            hint = f"did you mean {' or '.join(close)}?" if close else "SHOW TABLES lists the topics"
            return NotFoundError(f"{self._access.title} has no topic {missing[1]}", hint=hint)
        if isinstance(error, duckdb.OutOfMemoryException):
            hint = "SET memory_limit = '2GB' gives it more; COPY needs less with (ROW_GROUP_SIZE 10000)"
            return UsageError(text.splitlines()[0], hint=hint)
        lines = [line.strip() for line in text.split("\n\nLINE ", maxsplit=1)[0].splitlines() if line.strip()]
        quoted = [topic for topic in topics if not topic.isidentifier() and topic in text]
        how_to_quote = f'write "{quoted[0]}" in double quotes' if quoted else ""
        return UsageError(" ".join(lines), hint=how_to_quote)

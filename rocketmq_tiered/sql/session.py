"""DuckDB on one archive: each topic a view. Owns the connection, its limits, and its spill directory.

No statement can change the archive, which DuckDB sees only through scans. Statements may read and write local files, as
the user who runs them.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

import duckdb

from fetcher.access import ArchiveAccess
from rocketmq_tiered.sql.topic import Topic, TopicDataset
from tiered.errors import NotFoundError, TieredError, UsageError

logger = logging.getLogger(__name__)

MEMORY_BYTES = 256 << 20
"""Memory of DuckDB's operators; larger joins, groups and sorts spill to a temporary directory."""
THREADS_MAX = 2
_LISTS_TABLES = re.compile(r"show|pragma|_schema|duckdb_|pg_|sqlite_")
_NO_TABLE = re.compile(r"Table with name (.+?) does not exist")


class SqlSession:
    """Statements on the topics of one archive. Close it before the archive; then its relations fail."""

    def __init__(self, access: ArchiveAccess) -> None:
        self._access = access
        self._failure: TieredError | None = None
        self._spill = tempfile.TemporaryDirectory(prefix="tiered-sql-")
        self._connection = duckdb.connect(
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
        self._connection.execute("SET TimeZone = 'UTC'")
        self._waiting: dict[str, str] = {}
        """Topics that are no tables yet, by the name that they will have: there may be 100,000s."""
        names: dict[str, str] = {}
        for topic in access.topics():
            same = names.setdefault(topic.lower(), topic)  # names differ in more than case
            name = topic if same == topic else f"{topic} {len(names)}"
            if name != topic:
                logger.warning('topic %s is table "%s", as SQL does not tell it from %s', topic, name, same)
            self._waiting[name] = topic

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """DuckDB's own connection with all topics, for programs that need more than this class offers."""
        self._register(list(self._waiting))
        return self._connection

    def _register(self, names: Iterable[str]) -> None:
        for name in names:
            topic = Topic(self._access, self._waiting.pop(name))
            self._connection.register(name, TopicDataset(topic, self._failed))

    def execute(self, statement: str | duckdb.Statement) -> duckdb.DuckDBPyConnection:
        """Run a statement, whose rows are then fetched; those of the one before are not."""
        self._connection.abort()
        self._name(statement)
        return self._connection.execute(statement)

    def _name(self, statement: str | duckdb.Statement) -> None:
        """Register the topics whose names are in ``statement``, or all if it may list tables."""
        text = (statement if isinstance(statement, str) else statement.query).lower()
        lists = _LISTS_TABLES.search(text)
        named = [name for name in self._waiting if lists or name.lower().replace('"', '""') in text]
        self._register(named)

    def close(self) -> None:
        """Release memory and temporary files. Idempotent."""
        self._connection.close()
        self._spill.cleanup()

    def statements(self, text: str) -> list[duckdb.Statement]:
        """The statements of ``text``. Raises UsageError for what is not SQL."""
        with self.errors():
            return self._connection.extract_statements(text)

    def query(self, statement: str | duckdb.Statement) -> duckdb.DuckDBPyRelation | None:
        """The result, read when it is fetched; None of a statement without one. Raises as ``errors``."""
        with self.errors():
            self._name(statement)
            return self._connection.sql(statement)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """DuckDB's errors as this program's: what reading the archive raised, NotFoundError for a topic, UsageError."""
        self._failure = None
        try:
            yield
        except RuntimeError as error:
            if str(error) != "Query interrupted":
                raise
            raise KeyboardInterrupt from error
        except duckdb.Error as error:
            raise self._error_of(error) from error

    def _error_of(self, error: duckdb.Error) -> TieredError:
        if self._failure is not None:
            return self._failure
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

    def _failed(self, error: TieredError) -> None:
        self._failure = error

"""DuckDB on one archive: each topic a view. Owns the connections, one a thread, their limits, and the spill directory.

No statement can change the archive, which DuckDB sees only through scans. Unless files are allowed, statements reach no
file and no network, but for the file that a COPY writes, and change no setting that could.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from threading import Lock, local
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakSet

import duckdb
import orjson
import pyarrow.compute as pc

from fetcher.access import ArchiveAccess
from rocketmq_tiered.message_table.options.source_options import Mode, SourceOptions
from rocketmq_tiered.sql.statement_tree import add_ranges, last_rows
from rocketmq_tiered.sql.topic import Report, Topic, TopicDataset
from tiered.errors import NotFoundError, TieredError, UsageError
from tiered.formats.keys import CATALOG_PREFIX
from tiered.model.dates import DATES_END_MS
from tiered.object_store.open_store import parse_url

T = TypeVar("T")
MEMORY_BYTES = 512 << 20
"""Memory of DuckDB. Joins, groups and sorts spill to a temporary directory above a quarter of it, which leaves room to
merge what they spilled: a sort of 500,000 messages of 1 KiB fails with half of it, or without that bound."""
SMALL_STEPS = "PRAGMA verify_parallelism"
"""Lets DuckDB merge what a sort spilled by 2,048 rows at a time. By default each thread has 122,880 rows in memory,
which is more than all memory if they are whole messages. It can only be set before CLOSED locks the settings."""
CURSORS = 16
"""So many connections are made before the settings are locked, for the first threads. Sorts in later ones need more
memory."""
GROUP_BYTES = 16 << 20
"""The size of a row group in Parquet files that COPY writes, unless the statement sets one: DuckDB's default of 122,880
rows takes too much memory."""
THREADS_MAX = 2
END_ROWS, END_GROWTH = 64, 16
"""The last rows of a topic are looked for in so many offsets, or ms, before its end; if there are fewer, in END_GROWTH
times as many each next time."""
Parameters = Sequence[Any] | Mapping[str, Any] | None
"""The parameters of a statement: a list for ``?`` and ``$1``, or a mapping for ``$name``."""
ALL_TOPICS = "messages"
"""The table of all topics, unless a topic has its name."""
CLOSED = """SET enable_external_access = false;
SET allowed_configs = ['TimeZone', 'memory_limit', 'operator_memory_limit', 'threads']; SET lock_configuration = true"""
"""Unless files are allowed: other settings could write files as well."""
NO_RESULT = "SELECT true AS Success LIMIT 0"
_MADE = """SELECT unnest(?::VARCHAR[]) AS name UNION SELECT table_name FROM duckdb_tables() UNION
SELECT view_name FROM duckdb_views() WHERE NOT internal AND tags['duckdb_python_register'] IS NULL ORDER BY 1"""
"""The given names, and those of tables and views that statements made."""


@dataclass(eq=False)
class _Cursor:
    """A thread's connection, the topic of each of its views, and what a scan for it raised."""

    connection: duckdb.DuckDBPyConnection
    views: dict[str, str] = field(default_factory=dict)
    failure: TieredError | None = None


class SqlSession:
    """Statements on the topics of one archive, from any threads, which share all tables except temporary ones. Close it
    before the archive; then its relations fail."""

    def __init__(
        self,
        access: ArchiveAccess,
        *,
        allow_files: bool = False,
        explode_batches: bool = False,
        permissive: bool = False,
    ) -> None:
        """``explode_batches``: one row for each message of a batch. ``permissive``: damage is skipped and logged."""
        self._access, self._version = access, -1
        mode = Mode.PERMISSIVE if permissive else Mode.FAILFAST
        self._options = SourceOptions(access.title, explode_batches=explode_batches, mode=mode)
        self.report: Report = lambda done, total, scan: None
        self._beside = ""
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
                "errors_as_json": "true",
            },
        )
        self._unused = [self._database.cursor() for _ in range(CURSORS)]
        for cursor in self._unused:
            cursor.execute(SMALL_STEPS)
        self._database.execute("" if allow_files else CLOSED)
        self._names: dict[str, list[str]] = {}
        """Topics of each name in lower case, which is what DuckDB compares."""
        self._cursors = WeakSet[_Cursor]()
        """The cursors of threads that live."""

    def execute(
        self, statement: str | duckdb.Statement, parameters: Parameters = None
    ) -> duckdb.DuckDBPyConnection:
        """Run a statement and return the connection from which its rows are fetched; rows of the statement before can
        no longer be. Raises what ``errors`` raises."""
        self._own().connection.abort()
        return self._run(statement, parameters, lambda own, text, given: own.execute(text, given))

    def query(
        self, statement: str | duckdb.Statement, parameters: Parameters = None
    ) -> duckdb.DuckDBPyRelation:
        """The result as a relation, which is read when it is fetched, or at once if there are ``parameters``. Raises
        what ``errors`` raises."""

        def related(own: duckdb.DuckDBPyConnection, text: str, given: Parameters) -> duckdb.DuckDBPyRelation:
            """The result of a statement as a relation; if a table is missing, the error is raised with DuckDB's full
            text."""
            try:
                found = own.sql(text, params=given)
                return own.sql(NO_RESULT) if found is None else found
            except duckdb.CatalogException:  # says in words alone what is missing
                own.execute(text, given)
                raise

        return self._run(statement, parameters, related)

    def _own(self) -> _Cursor:
        """The cursor of this thread, made at its first statement: views and settings belong to one connection."""
        own: _Cursor | None = getattr(self._local, "cursor", None)
        if own is None:
            with self._lock:
                connection = self._unused.pop() if self._unused else self._database.cursor()
            own = self._local.cursor = _Cursor(connection)
            own.connection.execute(
                f"SET TimeZone = 'UTC'; SET operator_memory_limit = '{MEMORY_BYTES >> 22}MiB'"
            )
            self._cursors.add(own)
        return own

    def _run(
        self,
        statement: str | duckdb.Statement,
        parameters: Parameters,
        run: Callable[[duckdb.DuckDBPyConnection, str, Parameters], T],
    ) -> T:
        """Run the statements before the last one, and return what ``run`` returns for the last. Where DuckDB misses a
        table that is a topic, a view of the topic is made and the statement is run again: there may be 100,000s of
        topics, so that not all have views."""
        own = self._own()
        parts = self.statements(statement) if isinstance(statement, str) else [statement]
        *before, text = [one.query for one in parts] or [""]
        for one in before:
            self.execute(one)
        self._note_topics(own)
        if [word for _, word in _words(text.replace(";", " ").lower())] == ["show", "tables"]:
            text, parameters = _MADE, [[topic for same in self._names.values() for topic in same]]
        tried = set[str]()
        with self.errors(text), self._copied(text) as copied:
            planned = self._planned(own, copied, parameters)
            while True:
                try:
                    return run(own.connection, planned, parameters)
                except duckdb.CatalogException as error:
                    planned = self._with_topic(own, planned, error, tried)

    def _planned(self, own: _Cursor, text: str, parameters: Parameters) -> str:
        """The statement ``text``, changed if possible so that it reads less: ranges of times are added to its
        conditions, or its topic is replaced by a view of the topic's end if it is for the last rows."""
        tree = orjson.loads(self._called("json_serialize_sql(?::VARCHAR)", text))
        if add_ranges(tree, self._parsed):
            return self._called("json_deserialize_sql(?::JSON)", orjson.dumps(tree).decode())
        last = last_rows(tree)
        if last is None or len(self._same(last.table)) != 1:
            return text
        made = own.connection.execute(_MADE, [[]]).fetchall()
        if last.table.lower() in [name.lower() for (name,) in made]:
            return text
        queues = self._access.queues(self._same(last.table)[0] or None, hidden=False)
        is_offset, width = last.column == "queue_offset", max(last.rows, END_ROWS)
        end = max(
            (one.max_offset if is_offset else min(one.newest_ms, DATES_END_MS) for one in queues), default=0
        )
        while width < end:
            column = pc.field("queue_offset" if is_offset else "store_timestamp")
            view = self._viewed(
                own, f"{last.table} #{uuid4().hex}", self._same(last.table)[0], column >= end - width
            )
            shortened = _renamed(text, last.location, last.table, view)
            try:
                # The hash needs all columns: the scan keeps what it read of them for the statement itself.
                # The user's own statement is counted.
                counted = f"SELECT count(*), bit_xor(hash(x)) FROM ({shortened.rstrip('; ')}\n) AS x"  # nosec B608
                found = own.connection.execute(counted, parameters).fetchall()
            except duckdb.Error:  # as the statement itself will say
                return text
            if found[0][0] == last.rows:
                return shortened
            own.connection.unregister(view)
            width *= END_GROWTH
        return text

    def _called(self, function: str, text: str) -> str:
        """What a function of DuckDB makes of ``text``."""
        with self._lock:
            found = self._database.execute(f"SELECT {function}", [text]).fetchall()
        return str(found[0][0])

    def _parsed(self, expression: str) -> dict[str, Any]:
        tree = orjson.loads(self._called("json_serialize_sql(?::VARCHAR)", f"SELECT {expression}"))
        return dict(tree["statements"][0]["node"]["select_list"][0])

    def _viewed(self, own: _Cursor, view: str, topic: str, within: Any = None) -> str:
        """Make a view of the rows of ``topic`` for which ``within``, an expression of Arrow, is true."""
        read = Topic(self._access, topic, self._options)
        rows = TopicDataset(
            read,
            partial(setattr, own, "failure"),
            lambda *seen: self.report(*seen),  # noqa: PLW0108 - the attribute changes
            within,
        )
        own.connection.register(view, rows)
        own.views[view] = topic
        return view

    def _note_topics(self, own: _Cursor) -> None:
        """Read the names of topics again if the archive has changed, and drop views whose name no longer means one
        topic."""
        with self._lock:
            if self._access.state.version != self._version:
                self._version, names = self._access.state.version, dict[str, list[str]]()
                for topic in self._access.topics():
                    names.setdefault(topic.lower(), []).append(topic)
                self._names = names
        gone = [view for view, topic in own.views.items() if "#" not in view and self._same(view) != [topic]]
        for view in gone:
            own.connection.unregister(view)
            del own.views[view]

    def _same(self, name: str) -> list[str]:
        """The topics whose names DuckDB takes for ``name``, in upper or lower case; an empty one stands for all
        topics."""
        return self._names.get(name.lower(), [""] if name.lower() == ALL_TOPICS else [])

    def _with_topic(self, own: _Cursor, text: str, error: duckdb.Error, tried: set[str]) -> str:
        """``text`` when the table that DuckDB misses is a view; raises ``error`` if it is no topic. DuckDB takes names
        that differ in case alone for the same: such topics have views of other names, which are put into ``text``."""
        missing = _details(error)
        name = missing.get("name", "") if missing.get("type") == "Table" else ""
        same = self._same(name)
        if not same or name in tried:
            raise error
        topic, view = same[0], same[0] or ALL_TOPICS
        if len(same) > 1:
            topic, view = name, f"{name} #{name.encode().hex()}"
            text = (
                _renamed(text, orjson.loads(missing.get("location", "[0, 0]")), name, view)
                if name in same
                else ""
            )
            if not text:
                names = " and ".join(f'"{one}"' for one in same)
                raise UsageError(
                    f"{name} does not say which of the topics {names} is meant",
                    hint=f"write one quoted, in parentheses: (FROM {names.partition(' ')[0]})",
                )
        else:
            tried.add(name)
        if view not in own.views or len(same) == 1:  # a statement may drop a view
            self._viewed(own, view, topic)
        return text

    @contextmanager
    def _copied(self, text: str) -> Iterator[str]:
        """``text``, whose COPY writes into the spill directory; what it wrote then takes the place of the file that it
        names, whole or not at all."""
        found = _copy_target(text)
        if found is None:
            yield text
            return
        before, path, after = found
        target = Path(path).absolute()
        self._check_target(target)
        with tempfile.TemporaryDirectory(dir=self._spill.name) as made:
            written = f"{made}/{target.name}"
            yield before + _quoted(written, "'") + _bounded(after, target)
            self._place(Path(written), target)

    def _check_target(self, target: Path) -> None:
        own, parents = parse_url(self._access.store.url), target.resolve().parents
        is_inside = own.scheme == "file" and Path(own.place).resolve().parents[1] in parents
        if is_inside or any(any((one / CATALOG_PREFIX).glob("[0-9]" * 20)) for one in parents):
            raise UsageError(f"{target} is inside an archive", hint="COPY to a place outside it")
        if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
            raise UsageError(f"{target} exists and is not a file", hint="COPY to a new name")

    def _place(self, written: Path, target: Path) -> None:
        """Move the file ``written`` beside ``target``, as it may be on another disk, and then replace the target at
        once."""
        try:
            with tempfile.TemporaryDirectory(prefix=".tiered-sql-", dir=target.parent) as beside:
                self._beside = beside
                shutil.move(written, beside)
                os.replace(Path(beside, target.name), target)
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}") from error

    def interrupt(self) -> None:
        """Ask DuckDB to end the statements that run."""
        for one in self._cursors:
            one.connection.interrupt()

    def close(self) -> None:
        """Release memory and temporary files. Idempotent."""
        for connection in (*(one.connection for one in self._cursors), *self._unused, self._database):
            connection.close()
        self._spill.cleanup()

    def abandon(self) -> None:
        """Delete temporary files although a statement may run, which cannot make more of them then. The process must
        end afterwards."""
        for path in (self._spill.name, self._beside):
            while path and os.path.lexists(path):
                shutil.rmtree(path, ignore_errors=True)

    def statements(self, text: str) -> list[duckdb.Statement]:
        """The statements of ``text``. Raises UsageError for what is not SQL."""
        with self.errors(text):
            return self._own().connection.extract_statements(text)

    @contextmanager
    def errors(self, text: str = "") -> Iterator[None]:
        """Turn DuckDB's errors in the statement ``text`` into this program's: the error with which reading the archive
        failed, NotFoundError for a missing topic, or UsageError."""
        self._own().failure = None
        try:
            yield
        except RuntimeError as error:
            if str(error) != "Query interrupted":
                raise
            raise KeyboardInterrupt from error
        except duckdb.Error as error:
            raise self._error_of(error, text) from error

    def _error_of(self, error: duckdb.Error, text: str) -> TieredError:
        """The TieredError for an error of DuckDB in the statement ``text``: what stopped a scan, if one failed, or
        else DuckDB's message with a hint."""
        if (failure := self._own().failure) is not None:
            return failure
        details, kind = _details(error), str(error).partition(":")[0]
        message = " ".join(details["exception_message"].split())
        if details.get("error_subtype") == "MISSING_ENTRY" and details.get("type") == "Table":
            close = get_close_matches(details["name"], self._access.topics())
            hint = f"did you mean {' or '.join(close)}?" if close else "SHOW TABLES lists the topics"
            return NotFoundError(f"{self._access.title} has no topic {details['name']}", hint=hint)
        hint = ""
        if isinstance(error, duckdb.OutOfMemoryException):
            message = message.partition(" Possible solutions")[0]
            hint = "SET memory_limit = '2GB' gives DuckDB more memory"
        elif isinstance(error, duckdb.PermissionException):
            hint = (
                "--allow-files, or Archive.session(allow_files=True), lets statements use files and networks"
            )
        elif isinstance(error, duckdb.ParserException):
            hint = self._how_to_quote(text, int(details.get("position", -1)))
        return UsageError(f"{kind}: {message}", hint=hint)

    def _how_to_quote(self, text: str, position: int) -> str:
        """The hint for a topic whose name needs quotes, if the statement has one at ``position``, where DuckDB
        stopped; else empty."""
        at, lower = len(text.encode()[: max(position, 0)].decode(errors="replace")), text.lower()
        for topic in self._access.topics() if position >= 0 else ():
            begin = lower.find(topic.lower(), max(at - len(topic) + 1, 0))
            if 0 <= begin <= at and [kind for _, kind in duckdb.tokenize(topic)] != [
                duckdb.token_type.identifier
            ]:
                return f'write "{topic}" in double quotes'
        return ""


def _details(error: duckdb.Error) -> dict[str, str]:
    """The fields of a DuckDB error, which is JSON. Errors of relations are plain text all the same: of these the text
    without the excerpt of the statement, as ``exception_message``."""
    text = str(error).partition(": ")[2]
    try:
        found: dict[str, str] = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"exception_message": text.partition("\n\nLINE ")[0]}
    return found


def _renamed(text: str, location: tuple[int, int], name: str, view: str) -> str:
    """``text`` with the table at ``location`` read from ``view``, and its columns still those of ``name``; empty if the
    name is not written there."""
    at, size = location
    data = text.encode()
    here = data[at : at + size].decode(errors="replace")
    written = re.match(rf'("{re.escape(name)}"|{re.escape(name)})(?![\w"])', here)
    if written is None:
        return ""
    alias = "" if here[written.end() :].strip() else f" AS {_quoted(name)}"
    return f"{data[:at].decode()}{_quoted(view)}{here[written.end() :]}{alias}{data[at + size :].decode()}"


def _quoted(text: str, mark: str = '"') -> str:
    return mark + text.replace(mark, mark * 2) + mark


def _bounded(options: str, target: Path) -> str:
    """The ``options`` of a COPY, with row groups of so many bytes if it writes Parquet and they do not say what these
    have."""
    words = options.lower()
    if "row_group" in words or "parquet" not in (words if "format" in words else target.suffix.lower()):
        return options
    before, bracket, after = options.partition("(")
    size = f"ROW_GROUP_SIZE_BYTES {GROUP_BYTES}"
    return f"{before}({size}, {after}" if bracket else f" ({size}){options}"


def _words(text: str) -> list[tuple[int, str]]:
    """The words of a statement without comments, each behind the byte at which it begins."""
    data, tokens = text.encode(), duckdb.tokenize(text)
    ends = [at for at, _ in tokens[1:]] + [len(data)]
    return [
        (at, data[at:end].decode().strip())
        for (at, kind), end in zip(tokens, ends, strict=False)
        if kind != duckdb.token_type.comment
    ]


def _copy_target(text: str) -> tuple[str, str, str] | None:
    """What is before, in and behind the quotes of the file's name, if ``text`` is COPY … TO 'file': the last TO, as the
    query may have strings of its own. A URL is not a file."""
    data, words = text.encode(), _words(text)
    for number in range(len(words) - 1, 1, -1) if words and words[0][1].lower() == "copy" else ():
        at, word = words[number]
        named = re.fullmatch(r"'((?:[^']|'')*)'", word)
        if named and words[number - 1][1].lower() == "to" and "://" not in named[1]:
            before, after = data[:at].decode(), data[at + len(word.encode()) :].decode()
            return before, named[1].replace("''", "'"), after
    return None

"""`tiered export`: every message once, in Parquet files and Iceberg tables, whatever dies between.

A REST catalog of Iceberg tables in memory, with the requests that PyIceberg makes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import MetastoreCatalog, load_catalog
from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import update_table_metadata

from rocketmq_tiered.export import (
    ExportJob,
    ExportProgress,
    IcebergWriter,
    PartsWriter,
    open_catalog,
    write_part,
)
from rocketmq_tiered.export.export_job import ExportReport
from rocketmq_tiered.export.export_progress import PartDone
from rocketmq_tiered.export.parquet_parts import PartTask
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.sql.conftest import STORED_MS
from tiered.errors import UsageError
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

Run = Callable[..., tuple[int, str, str]]
DAY_MS = 86_400_000
COLUMNS = "topic", "queueId", "queueOffset", "storeTime", "body"


def _table(target: Path, name: str = "rocketmq.messages") -> Table:
    return load_catalog("tiered", type="sql", uri=f"sqlite:///{target}/catalog.db").load_table(name)


def _rows(target: Path) -> Counter[tuple[str, int, int]]:
    found = _table(target).scan(selected_fields=("topic", "queueId", "queueOffset")).to_arrow()
    return Counter(zip(*(found[name].to_pylist() for name in found.column_names), strict=True))


def _grow(builder: ArchiveBuilder, day: int, count: int = 30) -> None:
    builder.commit(
        [
            Sent(QueueKey(topic, number % 2, 0), b"x" * number, stored_ms=STORED_MS + day * DAY_MS)
            for number in range(count)
            for topic in ("orders", "a-topic-with-a-name-longer-than-statistics", f"%RETRY%{'g' * 255}")
        ]
    )


def test_an_iceberg_table_grows_by_batches(run: Run, tmp_path: Path) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker"))
    url, target = f"file://{tmp_path}/archive", tmp_path / "table"
    for day in range(3):
        _grow(builder, day)
        code, out, err = run("export", url, f"file://{target}", "--format", "iceberg", "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["rows"] == 90
        rows = _rows(target)
        assert len(rows) == sum(rows.values()) == 90 * (day + 1)
    code, out, _ = run("export", url, f"file://{target}", "--format", "iceberg")
    assert (code, out) == (0, f"file://{target}: no new messages\n")
    table = _table(target)
    assert len(table.snapshots()) == 3
    files = [task.file for task in table.scan(row_filter="topic == 'orders'").plan_files()]
    assert len(files) == 3
    assert {file.partition[1] for file in files} == {(STORED_MS // DAY_MS) + day for day in range(3)}
    code, _, err = run("export", url, f"file://{target}", "--format", "parquet")
    assert code == 2
    assert "was started with iceberg" in err
    for wrong, message in (
        (("--catalog", "sqlite:////none/here.db"), "--catalog requires --format iceberg"),
        (("--format", "iceberg", "--table", "plain"), "does not name a table in a namespace"),
        (("--format", "iceberg", "--table", "a.b.c"), "does not name a table in a namespace"),
        (("--format", "iceberg", "--catalog", "sqlite:////none/here/catalog.db"), "sqlite:////none/here"),
        (("--format", "iceberg", "--catalog", "http://user:SECRET@127.0.0.1:9"), "http://…@127.0.0.1:9"),
        (("--format", "iceberg", "--catalog", "postgresql://user:SECRET@127.0.0.1:9/x"), "//…@127.0.0.1:9"),
        (
            ("--format", "iceberg", "--catalog", f"sqlite:///{target}/catalog.db"),
            "the table is elsewhere",
        ),
    ):
        code, _, err = run("export", url, f"file://{tmp_path}/other", *wrong)
        assert code in (2, 4)
        assert message in err and "SECRET" not in err
        assert err.count("\n") == 1
    assert not list((tmp_path / "other").rglob("*.parquet"))
    shutil.copytree(target, tmp_path / "copy")
    _grow(builder, 4)
    code, _, err = run("export", url, f"file://{tmp_path}/copy", "--format", "iceberg")
    assert (code, "the table is elsewhere" in err) == (2, True), err
    assert len(_table(target).snapshots()) == 3
    shutil.rmtree(target / "metadata")
    code, _, err = run("export", url, f"file://{target}", "--format", "iceberg")
    assert (code, ".metadata.json does not exist" in err) == (3, True), err


def test_a_rest_catalog_when_one_is_given(run: Run, tmp_path: Path) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker"))
    with rest_catalog() as (uri, requests):
        for day in range(2):
            _grow(builder, day)
            target = f"file://{tmp_path}/table"
            given = ("--format", "iceberg", "--catalog", uri, "--table", "lake.archived")
            code, _, err = run("export", f"file://{tmp_path}/archive", target, *given, "--json")
            assert (code, err) == (0, "")
        table = load_catalog("other", type="rest", uri=uri).load_table("lake.archived")
        assert table.scan().to_arrow().num_rows == 180
        assert "POST /v1/namespaces/lake/tables/archived" in requests
    assert not (tmp_path / "table" / "catalog.db").exists()
    code, _, err = run("export", f"file://{tmp_path}/archive", f"file://{tmp_path}/t2", *given)
    assert (code, err.count("\n")) == (4, 1), err


class _DiedError(Exception):
    pass


class _Dying:
    """Runs parts, and dies before a part, or after all of them."""

    def __init__(self, dies_before: int) -> None:
        self.left = dies_before

    def __call__(self, tasks: Sequence[PartTask]) -> list[PartDone]:
        done = []
        for task in tasks:
            if self.left == 0:
                raise _DiedError
            self.left -= 1
            done.append(write_part(task))
        return done


@pytest.mark.parametrize(
    "dies", ["before part 0", "before part 2", "before the commit", "after the commit", "finishing"]
)
def test_what_dies_is_finished_by_the_next_export(
    dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker"))
    _grow(builder, 0)
    target, store = f"file://{tmp_path}/table", StoreOptions()
    source = SourceOptions(f"file://{tmp_path}/archive", columns=COLUMNS, partition_bytes=4000)

    def export(left: int = 1 << 30) -> int:
        parts = PartsWriter(target, store, _Dying(left), 1, lambda done, total: None, is_table=True)
        with closing(open_store(target, store)) as target_store:
            catalog = open_catalog("", target, target_store)
            job = ExportJob(
                source, target, "iceberg", ExportProgress(target_store), IcebergWriter(catalog, "n.t", parts)
            )
            return job.run().rows

    def die(*arguments: object, **names: object) -> None:
        raise _DiedError

    def rows() -> Counter[tuple[str, int, int]]:
        found = _table(tmp_path / "table", "n.t").scan().to_arrow()
        return Counter(
            zip(*(found[name].to_pylist() for name in ("topic", "queueId", "queueOffset")), strict=True)
        )

    with monkeypatch.context() as patched, pytest.raises(_DiedError):
        if dies == "before the commit":
            patched.setattr(Table, "transaction", die)
        elif dies == "after the commit":
            patched.setattr(ExportProgress, "finish", die)
        elif dies == "finishing":
            commit = IcebergWriter._commit

            def committed(self: IcebergWriter, *arguments: object) -> None:
                commit(self, *arguments)  # type: ignore[arg-type]
                raise _DiedError

            patched.setattr(IcebergWriter, "_commit", committed)
        export(int(dies.rsplit(maxsplit=1)[-1]) if "part" in dies else 1 << 30)
    _grow(builder, 1)
    export()
    found = rows()
    assert len(found) == sum(found.values()) == 180
    assert export() == 0


def test_of_two_exports_at_once_each_says_what_the_other_wrote(tmp_path: Path) -> None:
    _grow(ArchiveBuilder(PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker")), 0)
    source = SourceOptions(f"file://{tmp_path}/archive", columns=COLUMNS, partition_bytes=4000)
    target, reports = f"file://{tmp_path}/files", list[ExportReport]()

    def export(run: Callable[[Sequence[PartTask]], list[PartDone]]) -> None:
        parts = PartsWriter(target, StoreOptions(), run, 1, lambda done, total: None)
        with closing(open_store(target)) as store:
            reports.append(ExportJob(source, target, "parquet", ExportProgress(store), parts).run())

    def overtaken(tasks: Sequence[PartTask]) -> list[PartDone]:
        first = write_part(tasks[0])
        export(lambda others: list(map(write_part, others)))
        return [first, *map(write_part, tasks[1:])]

    export(overtaken)
    other, own = reports
    assert own.rows == other.rows == own.rows_before + other.rows_before == 90
    assert 0 < other.rows_before < 45
    assert f", of which another export wrote {own.rows_before}" in own.lines()[0]


@pytest.mark.integration
def test_killed_five_times(real_store: Callable[[str], Path], tmp_path: Path, run: Run) -> None:
    """SIGKILL at five moments of real exports of store E; at the end every message is there once."""
    url = f"file://{tmp_path}/archive"
    store = real_store("E") / "store"
    assert run("backfill", store, url, "--cluster", "c", "--broker", "b")[0] == 0
    target = tmp_path / "table"
    command = [
        sys.executable,
        "-m",
        "rocketmq_tiered.cli",
        "export",
        url,
        f"file://{target}",
        "--format",
        "iceberg",
    ]
    kills = 0
    for delay_s in (0.0, 0.1, 0.2, 0.4, 0.7):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            progress = target / "_tiered_export"
            while process.poll() is None and not progress.exists():
                time.sleep(0.01)
            time.sleep(delay_s)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
    assert kills == 5
    assert subprocess.run(command, check=False).returncode == 0
    rows = _rows(target)
    listed = json.loads(run("ls", url, "--json")[1])["queues"]
    assert set(rows.values()) == {1}
    assert len(rows) == sum(one["messages"] for one in listed)


def test_files_are_readable_as_the_umask_says_and_replace_no_others(run: Run, tmp_path: Path) -> None:
    _grow(ArchiveBuilder(PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker")), 0)
    url, day = f"file://{tmp_path}/archive", f"date={date.fromtimestamp(STORED_MS // 1000)}"
    for umask, mode in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        target, before = tmp_path / f"{umask}", os.umask(umask)
        try:
            assert run("export", url, f"file://{target}")[0] == 0
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in target.rglob("*.parquet")} == {mode}
    (tmp_path / "elsewhere").mkdir()
    for number, plant in enumerate((os.symlink, lambda _, path: path.mkdir())):
        planted = tmp_path / f"planted{number}" / "topic=orders"
        planted.parent.mkdir()
        plant(tmp_path / "elsewhere", planted)
        if number:
            (planted / day).mkdir()
            (planted / day / "00000001-00000000.parquet").write_bytes(b"of somebody else")
        code, _, err = run("export", url, f"file://{planted.parent}")
        assert code == 2 and ("symbolic link" in err or "has other rows than this export" in err), err
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_target_inside_the_archive_is_refused(tmp_path: Path) -> None:
    writer = PartsWriter("", StoreOptions(), _Dying(0), 1, lambda done, total: None)
    with pytest.raises(UsageError, match="is inside the archive"):
        ExportJob(
            SourceOptions("file:///a"), "file:///a/b", "parquet", ExportProgress(FileStore(tmp_path)), writer
        )


class _Handler(BaseHTTPRequestHandler):
    tables: dict[str, TableMetadata]
    requests: list[str]

    def _answer(self, code: int, document: Any = None) -> None:
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _table(self, metadata: TableMetadata) -> dict[str, Any]:
        return {
            "metadata-location": "memory",
            "metadata": json.loads(metadata.model_dump_json()),
            "config": {},
        }

    def do_GET(self) -> None:
        self.requests.append(f"GET {self.path}")
        if self.path.startswith("/v1/config"):
            return self._answer(200, {"defaults": {}, "overrides": {}})
        name = self.path.rpartition("/")[2].partition("?")[0]
        if name in self.tables:
            return self._answer(200, self._table(self.tables[name]))
        return self._answer(404, {"error": {"message": "none", "type": "NoSuchTableException", "code": 404}})

    def do_HEAD(self) -> None:
        self._answer(204 if self.path.rpartition("/")[2] in self.tables else 404)

    def do_POST(self) -> None:
        self.requests.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/namespaces":
            return self._answer(200, {"namespace": json.loads(body)["namespace"], "properties": {}})
        if self.path.endswith("/tables"):
            wanted = CreateTableRequest.model_validate_json(body)
            made = new_table_metadata(
                wanted.table_schema,
                wanted.partition_spec or UNPARTITIONED_PARTITION_SPEC,
                wanted.write_order or UNSORTED_SORT_ORDER,
                wanted.location or "",
                wanted.properties,
            )
            if not wanted.stage_create:
                self.tables[wanted.name] = made
            return self._answer(200, self._table(made))
        name = self.path.rpartition("/")[2]
        commit = CommitTableRequest.model_validate_json(body)
        base = self.tables.get(name)
        for requirement in commit.requirements:
            requirement.validate(base)
        before = base or MetastoreCatalog._empty_table_metadata()
        self.tables[name] = update_table_metadata(before, commit.updates, enforce_validation=base is None)
        return self._answer(200, self._table(self.tables[name]))

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def rest_catalog() -> Iterator[tuple[str, list[str]]]:
    """(URI of a running catalog, the requests it has had)."""
    requests: list[str] = []
    handler = type("Handler", (_Handler,), {"tables": {}, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""SQL on topics: DuckDB gets every row that its filters admit, whatever is pruned before."""

import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pyarrow.compute as pc
import pytest
from pyarrow import parquet

import rocketmq_tiered
from rocketmq_tiered.message_table.options.predicate import Allowed, Predicate
from rocketmq_tiered.message_table.scan.archive_scan import archive_chunks
from rocketmq_tiered.sql import session as session_module
from rocketmq_tiered.sql import topic as topic_module
from rocketmq_tiered.sql.pushed_filter import read_filter
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.sql.conftest import STORED_MS
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore


def test_filters_reach_catalog_and_rows(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Predicate] = []

    def noted(*given: Any) -> Any:
        seen.append(read_filter(*given)[0])
        return read_filter(*given)

    monkeypatch.setattr(topic_module, "read_filter", noted)
    with rocketmq_tiered.open(orders) as archive:
        for condition in (
            "store_time >= TIMESTAMPTZ '2026-11-21 01:00:00+00' - INTERVAL 1 HOUR AND queue_id IN (1, 0)",
            "tags IN ('t1', 't2') AND queue_offset < 50",
            "date_trunc('day', store_time) = DATE '2026-11-21' AND tags = 't1'",
            "keys IN ('k17', 'k18 x') AND uniq_key IS NULL",
            "(queue_offset < 5 OR 95 <= queue_offset) AND queue_id NOT IN (0, 2) AND (tags = 't1' OR tags IS NULL)",
        ):
            found = archive.sql(f"SELECT count(*) FROM (SELECT * FROM orders) AS o WHERE {condition}")
            assert found.fetchall()
    day_ms = 86_400_000
    assert [one for one in seen if one != Predicate()] == [
        Predicate({"storeTimestamp": Allowed.between(STORED_MS), "queueId": Allowed.of([0, 1])}),
        Predicate({"queueOffset": Allowed.between(high=49)}, tags=frozenset({"t1", "t2"})),
        Predicate(
            {"storeTimestamp": Allowed.between(STORED_MS, STORED_MS + day_ms - 1)}, tags=frozenset({"t1"})
        ),
        Predicate(keys=frozenset({"k17", "k18"})),
        Predicate(
            {
                "queueOffset": Allowed.between(5, 94).outside(),
                "queueId": Allowed.of([0, 2]).outside(),
            },
            tags=frozenset({"t1", ""}),
        ),
    ]


def test_joins_repeats_and_temporary_tables(orders: str) -> None:
    with rocketmq_tiered.open(orders) as archive:
        archive.sql("CREATE TEMP TABLE firsts AS FROM orders SELECT queue_offset, keys WHERE queue_id = 0")
        found = archive.sql(
            "WITH o AS (SELECT * FROM orders WHERE queue_offset < 30) SELECT count(*) FROM o a JOIN o b USING (keys) "
            "JOIN firsts f ON f.keys = a.keys JOIN \"pay-ments\" p ON (p.json->>'$.id') = '7'"
        )
        assert found.fetchall() == found.fetchall() == [(30,)]
        bodies = archive.sql('SELECT text, json, octet_length(body) FROM "pay-ments" ORDER BY queue_offset')
        assert bodies.fetchall() == [
            ('{"id": 7}', '{"id": 7}', 9),
            ("no json \ufffd", None, 9),
            ("", None, 0),
        ]
        frame = archive.sql("SELECT store_time, tags FROM orders WHERE keys = 'k3'")
        assert frame.df()["tags"].tolist() == ["t0"]
    with pytest.raises(UsageError, match="archive is closed"):
        archive.sql("SELECT 1")


def test_threads_ask_at_once_with_parameters_and_find_new_topics(tmp_path: Path) -> None:
    """Each has its own cursor, failures and temporary tables; tables are shared."""
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), "cluster/broker"))
    builder.commit(
        [Sent(QueueKey("orders", 0, 0), b"x" * n, tags=f"t{n % 4}", keys=["k"]) for n in range(400)]
    )
    with rocketmq_tiered.open(tmp_path) as archive, ThreadPoolExecutor(4) as pool:

        def ask(number: int) -> Any:
            if number % 4 == 3:
                with pytest.raises(NotFoundError, match="no topic missing"):
                    archive.sql("FROM missing")
            archive.sql("CREATE OR REPLACE TEMP TABLE mine AS SELECT ? AS number", [number])
            found = archive.sql(
                "SELECT count(*), any_value(number) FROM orders, mine WHERE tags = $tag AND queue_offset >= $low",
                {"tag": f"t{number % 4}", "low": 200},
            )
            return found.fetchall()

        assert list(pool.map(ask, range(24))) == [[(50, number)] for number in range(24)]
        assert len(archive.find_by_key("orders", "k")) == 400
        with patch("fetcher.access.PLACES_MAX", 399):
            many = archive.sql("SELECT count(*) FROM orders WHERE keys = 'k'")
            assert many.fetchall() == [(400,)]
        with pytest.raises(NotFoundError):
            archive.sql("FROM later")
        builder.commit([Sent(QueueKey("later", 0, 0), b"1")])
        archive.refresh()
        later = archive.sql("SELECT text FROM later")
        assert later.fetchall() == [("1",)]


def test_errors_say_what_to_do(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with rocketmq_tiered.open(orders) as archive:
        for statement, kind, message in (
            ("SELECT * FROM ordrs", NotFoundError, "has no topic ordrs; did you mean orders?"),
            ("SELECT * FROM zzz", NotFoundError, "has no topic zzz; SHOW TABLES lists the topics"),
            ("SELECT * FROM pay-ments", UsageError, 'write "pay-ments" in double quotes'),
            ("SELECT nothing FROM orders", UsageError, '"nothing" not found'),
            ("DROP TABLE orders", UsageError, "orders"),
            ("INSERT INTO orders VALUES (1)", UsageError, "orders"),
            ("SELECT * FROM read_csv('s3://bucket/file')", UsageError, "s3"),
        ):
            with pytest.raises(kind, match=re.escape(message)) as raised:
                archive.sql(statement)
            assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "rocketmq_tiered.sql.session", raising=False)
    monkeypatch.delattr("rocketmq_tiered.sql.SqlSession", raising=False)
    with (
        rocketmq_tiered.open(orders) as archive,
        pytest.raises(UsageError, match=re.escape("pip install 'rocketmq-tiered[sql]'")),
    ):
        archive.sql("SELECT 1")


def test_damage_is_an_error_of_its_own_kind(
    archive_k: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(archive_k.removeprefix("file://"), damaged)
    for path in [*damaged.rglob("*.so"), *damaged.rglob("*.sso")]:
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[20 : len(data) // 2] = bytes(len(data) // 2 - 20)
        path.write_bytes(data)
    with rocketmq_tiered.open(f"file://{damaged}") as archive:
        session = archive.session()
        with pytest.raises(CorruptionError), session.errors():
            session.execute("SELECT sum(octet_length(body)) FROM t_sizes").fetchall()
    question = (
        "SELECT count(*) AS all, count(text) AS read FROM t_sizes WHERE length(text) IS DISTINCT FROM -1"
    )
    code, _, err = run("sql", f"file://{damaged}", "--csv", question)
    assert (code, "--permissive" in err) == (CorruptionError.exit_code, True)
    code, out, err = run("sql", f"file://{damaged}", "--csv", "--permissive", question)
    assert (code, "skipped: " in err) == (0, True)
    assert int(out.split()[1].partition(",")[0]) < 100


def test_a_topic_whose_name_differs_in_case_alone_keeps_its_name(tmp_path: Path) -> None:
    """A name that is written exactly is never another topic's, whatever topics come later."""
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), "cluster/broker"))

    def send(*topics: str) -> None:
        builder.commit([Sent(QueueKey(topic, 0, 0), topic.encode()) for topic in topics])

    send("orders", "pay")
    with rocketmq_tiered.open(tmp_path) as archive:
        session = archive.session()

        def texts(table: str) -> set[tuple[str, ...]]:
            return set(session.execute(f"SELECT text FROM {table}").fetchall())

        assert texts("orders") == texts("ORDERS") == texts("query_table('or' || 'ders')") == {("orders",)}
        session.execute("CREATE TEMP VIEW seen AS FROM orders")
        assert texts("seen") == {("orders",)}
        send("Orders", "ORDERS", "orders", "Messages")
        archive.refresh()
        assert session.execute("-- é\nSHOW TABLES; -- all").fetchall() == [
            (name,) for name in ("Messages", "ORDERS", "Orders", "orders", "pay", "seen")
        ]
        for name in ("orders", "Orders", "ORDERS"):
            assert texts(name) == texts(f'"{name}"') == {(name,)}
            assert texts(f'(SELECT {name}.text FROM "{name}")') == {(name,)}
        pairs = "SELECT 'é', a.text, o.text FROM \"Orders\" a JOIN orders AS o USING (queue_offset)"
        assert session.execute(pairs).fetchall() == [("é", "Orders", "orders")]
        for unclear in ("oRDERS", "query_table('Or' || 'ders')", "seen"):
            with pytest.raises(UsageError, match='which of the topics "ORDERS" and "Orders" and "orders"'):
                texts(unclear)
        assert texts("messages") == {("Messages",)}


def test_the_table_of_all_topics(archive_k: str, orders: str) -> None:
    with rocketmq_tiered.open(orders) as archive:
        session = archive.session()
        by_topic = session.execute("SELECT topic, count(*) FROM messages GROUP BY ALL ORDER BY 1")
        assert by_topic.fetchall() == [("orders", 200), ("pay-ments", 3), ("payments", 1)]
        with patch.object(topic_module, "archive_chunks", wraps=topic_module.archive_chunks) as read:
            wanted = "SELECT sum(length(text)) FROM messages WHERE topic IN ('payments', 'none')"
            assert session.execute(wanted).fetchall() == [(12,)]
        assert {queue.topic for call in read.call_args_list for queue in call.args[1].queues} == {"payments"}
        with pytest.raises(UsageError, match="its options cannot be changed"):
            archive.session(permissive=True)
    with rocketmq_tiered.open(archive_k) as archive:
        session = archive.session(explode_batches=True)
        found = session.execute("SELECT count(*), sum(inner_num), max(queue_offset) FROM t_bcq")
        assert found.fetchall() == [(42, 42, 20)]
        session.execute("CREATE TABLE whole AS FROM t_bcq")
        for condition in ("queue_offset = 20", "tags IS NULL", "inner_num = 1", "keys IN ('k', 'k1')"):
            counts = [f"SELECT count(*) FROM {table} WHERE {condition}" for table in ("t_bcq", "whole")]
            assert len({tuple(session.execute(count).fetchall()) for count in counts}) == 1


def test_the_last_rows_and_a_day_read_their_part_of_a_topic(
    orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "END_ROWS", 4)
    day, objects = "store_time::DATE = DATE '2026-11-21'", "SELECT keys FROM orders WHERE queue_id = 1"
    for question, rows, parts in (
        (f"{objects} ORDER BY queue_offset DESC LIMIT 2;", [("k199",), ("k197",)], 1),
        (f"{objects} ORDER BY store_time DESC, keys LIMIT 1", [("k199",)], 1),
        (f"{objects} AND {day} AND length(keys) < 3 AND keys > 'k8'", [("k9",)], 4),
        (f"SELECT count(text) FROM orders WHERE {day.replace('21', '23')}", [(0,)], 0),
        ("SELECT count(text) FROM orders WHERE '2026-11-23' <= store_time::DATE", [(0,)], 0),
        (
            f"SELECT count(text) FROM orders WHERE store_time::DATE BETWEEN '2026-11-23' AND '2026-11-29' OR NOT {day} "
            "AND store_time::DATE IN ('2026-11-01', '2026-11-29')",
            [(0,)],
            0,
        ),
        (
            "SELECT count(text) FROM orders WHERE store_time::DATE NOT BETWEEN '2026-11-20' AND '2026-11-22'",
            [(0,)],
            0,
        ),
        (f"SELECT count(text) FROM messages WHERE NOT {day} OR {day.replace('=', '>')}", [(0,)], None),
    ):
        with rocketmq_tiered.open(orders) as archive:
            monkeypatch.setattr(topic_module, "archive_chunks", wrapped := Mock(wraps=archive_chunks))
            found = archive.sql(question)
            assert found.fetchall() == rows
            read = {one for call in wrapped.call_args_list for one in call.args[1].objects}
            assert parts in (None, len(read)), question
            assert "LIMIT" not in question or wrapped.call_count == 1


def test_the_last_rows_are_those_of_the_table_that_a_statement_names(
    orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of a topic whose name a statement's own table has, nor what another random number would choose."""
    monkeypatch.setattr(session_module, "END_ROWS", 4)
    last = "FROM orders {} ORDER BY queue_offset DESC LIMIT 3"
    for made in ("TABLE", "TEMP TABLE", "VIEW", "TEMP VIEW"):
        with rocketmq_tiered.open(orders) as archive:
            archive.sql(f"CREATE {made} Orders AS SELECT unnest([700, 5, 900]) AS queue_offset")
            assert archive.session().execute(last.format("")).fetchall() == [(900,), (700,), (5,)]
    with rocketmq_tiered.open(orders) as archive:
        session = archive.session()
        assert len(session.execute("FROM orders TABLESAMPLE 5 ROWS").fetchall()) == 5
        for _ in range(40):
            assert len(session.execute(last.format("WHERE random() < 0.2")).fetchall()) == 3


def test_each_of_some_statements_runs_once(orders: str) -> None:
    with rocketmq_tiered.open(orders) as archive:
        archive.sql("CREATE TABLE t(a INT)")
        found = archive.sql("INSERT INTO t VALUES (1); SELECT count(*), any_value(a) FROM t, orders")
        assert found.fetchall() == [(200, 1)]


def test_statements_reach_no_file_but_the_one_that_a_copy_writes(
    orders: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, source = Path(orders.removeprefix("file://")), tmp_path / "source.csv"
    source.write_text("a\n1\n")
    (tmp_path / "link.csv").symlink_to(source)
    before = sorted(root.rglob("*"))
    statements = {
        f"FROM read_csv('{source}')": "--allow-files",
        f"COPY mine FROM '{source}'": "--allow-files",
        f"ATTACH '{tmp_path}/new.db'": "--allow-files",
        f"EXPORT DATABASE '{tmp_path}/all'": "--allow-files",
        "COPY (SELECT 1) TO 's3://bucket/key.csv'": "--allow-files",
        "INSTALL httpfs": "--allow-files",
        "LOAD httpfs": "--allow-files",
        f"SET log_query_path = '{tmp_path}/log'": "locked",
        "SET enable_external_access = true": "locked",
        f"COPY orders TO '{root}/new.csv'": "inside an archive",
        f"COPY orders TO '{root}/cluster/broker/data/new.csv'": "inside an archive",
        f"COPY orders TO '{tmp_path}/link.csv'": "is not a file",
        f"COPY orders TO '{tmp_path}'": "is not a file",
        f"COPY orders TO '{tmp_path}/none/new.csv'": "cannot write",
    }
    with rocketmq_tiered.open(orders) as archive:
        archive.sql(
            "CREATE TABLE mine(a INT); SET TimeZone = 'Asia/Shanghai'; SET memory_limit = '300MiB'; SET threads = 1"
        )
        for statement, message in statements.items():
            with pytest.raises(UsageError, match=message):
                archive.sql(statement)
        monkeypatch.chdir(tmp_path)
        archive.sql(
            "-- é\nCOPY (SELECT 'TO ''y''.' AS t FROM orders LIMIT 3) TO 'it''s ö.csv' -- TO 'x'\n (HEADER false)"
        )
        archive.sql("COPY (SELECT 7 AS p, 8 AS q) TO 'parts' (FORMAT csv, PARTITION_BY p)")
    assert (tmp_path / "it's ö.csv").read_text() == "TO 'y'.\n" * 3
    assert [one.read_text() for one in tmp_path.glob("parts/p=7/*.csv")] == ["q\n8\n"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["it's ö.csv", "link.csv", "parts", "source.csv"]
    assert sorted(root.rglob("*")) == before
    with rocketmq_tiered.open(orders) as archive:
        session = archive.session(allow_files=True)
        assert session.execute(f"FROM read_csv('{source}')").fetchall() == [(1,)]
        with pytest.raises(UsageError, match="inside an archive"):
            session.execute(f"COPY orders TO '{root}/new.csv'")


def test_only_names_that_need_quotes_get_the_hint(tmp_path: Path) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), "cluster/broker"))
    for topic in ("order", "pay-ments", "%RETRY%g", "day", "plain"):
        builder.commit([Sent(QueueKey(topic, 0, 0))])
    hints = {
        "SELECT 'pay-ments' FROM ORDER": 'write "order" in double quotes',
        "FROM pay-ments": 'write "pay-ments" in double quotes',
        "FROM %RETRY%g": 'write "%RETRY%g" in double quotes',
        "SELECT 'order', pay-ments FRO plain": "",
        "FROM table": "",
        "SELECT * FROM plain plain plain": "",
        'SELECT nothing FROM "order"': "",
    }
    with rocketmq_tiered.open(tmp_path) as archive:
        for statement, hint in hints.items():
            with pytest.raises(UsageError) as raised:
                archive.sql(statement)
            assert raised.value.hint == hint, statement


def test_a_statement_makes_tables_of_the_topics_that_it_names(tmp_path: Path) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), "cluster/broker"))
    topics = [f"topic-{number}" for number in range(30)]
    builder.commit([Sent(QueueKey(topic, 0, 0), topic.encode()) for topic in topics])
    with rocketmq_tiered.open(tmp_path) as archive:
        session = archive.session()
        with patch.object(session_module, "TopicDataset", wraps=session_module.TopicDataset) as made:
            session.execute("SELECT 1")
            assert session.execute('SELECT text FROM "TOPIC-7"').fetchall() == [("topic-7",)]
            assert made.call_count == 1
            assert sorted(session.execute("SHOW TABLES").fetchall()) == sorted((topic,) for topic in topics)


def test_sorts_of_rows_that_do_not_fit_into_the_memory(
    orders: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MEMORY_BYTES", 64 << 20)
    monkeypatch.setattr(session_module, "GROUP_BYTES", 1 << 20)
    rows = (
        "SELECT hash(range) AS h, repeat(h::VARCHAR, 7) AS a, repeat(h::VARCHAR, 8) AS b FROM range(300000)"
    )
    with rocketmq_tiered.open(orders) as archive:
        session = archive.session()
        found = session.query(f"{rows} ORDER BY a")
        texts = found.to_arrow_table()["a"]
        assert len(texts) == 300_000 and texts.equals(texts.take(pc.array_sort_indices(texts)))
        for rest, groups in (
            (".parquet'", range(20, 200)),
            ("' WITH (FORMAT parquet);", range(20, 200)),
            (".parquet' (ROW_GROUP_SIZE 20480)", range(15, 16)),
        ):
            session.execute(f"COPY ({rows} ORDER BY h) TO '{tmp_path}/sorted{rest}")
            (target,) = tmp_path.iterdir()
            written = parquet.ParquetFile(target)
            assert (written.metadata.num_rows, written.num_row_groups in groups) == (300_000, True)
            target.unlink()

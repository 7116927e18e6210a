"""`tiered sql`: forms of output, statements from stdin and the prompt, exit codes."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from tests.sweeps import sweep

Run = Callable[..., tuple[int, str, str]]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_forms_of_output(run: Run, orders: str, tmp_path: Path) -> None:
    question = "SELECT tags, count(*) AS n, max(store_time) AS last FROM orders GROUP BY 1 ORDER BY 1"
    code, out, err = run("sql", orders, question)
    assert (code, err) == (0, "")
    assert [cell.strip() for cell in out.splitlines()[4].strip("│").split("│")] == [
        "t0",
        "67",
        "2026-11-21 03:18:00+00",
    ]
    code, out, _ = run("sql", orders, "--json", question)
    assert json.loads(out.splitlines()[2]) == {"tags": "t2", "n": 66, "last": "2026-11-21T03:17:00+00:00"}
    row = "SELECT queue_offset, properties, json, body, sum(5) OVER () AS s FROM orders WHERE keys = 'k4'"
    code, out, _ = run("sql", "--json", orders, row)
    (found,) = map(json.loads, out.splitlines())
    assert found["json"] == {"id": 4, "amount": 4}
    assert found["properties"]["KEYS"] == "k4"
    assert (found["body"], found["s"]) == ("eyJpZCI6IDQsICJhbW91bnQiOiA0fQ==", 5)
    code, out, _ = run("sql", orders, "--csv", row)
    assert out.splitlines()[0] == "queue_offset,properties,json,body,s"
    assert '""KEYS"":""k4""' in out.splitlines()[1]
    target, before = tmp_path / "orders.parquet", os.umask(0o022)
    assert run("sql", orders, f"COPY (SELECT * FROM orders) TO '{target}'")[0] == 0
    os.umask(before)
    assert target.stat().st_mode & 0o777 == 0o644
    assert (
        duckdb.sql(f"SELECT count(DISTINCT keys), sum(octet_length(body)) FROM '{target}'").fetchall()[0][0]
        == 200
    )
    made = "SET TimeZone = 'UTC'; CREATE VIEW v AS SELECT 1 AS a; CREATE TABLE t AS FROM v; INSERT INTO t VALUES (2);"
    for form, printed in (("--csv", "a\n1\n2\n"), ("--json", '{"a":1}\n{"a":2}\n')):
        assert run("sql", orders, form, f"{made} FROM t") == (0, printed, "")
    code, out, err = run("sql", orders, "SELECT 1 AS a; SELECT 'x\x1b[31m' AS b")
    assert code == 0
    assert "\x1b" not in out


def test_statements_from_stdin_and_the_prompt(run: Run, orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("SHOW TABLES; SELECT count(*) AS n FROM orders;"))
    code, out, _ = run("sql", orders, "--csv")
    assert (code, out.splitlines()) == (0, ["name", "orders", "pay-ments", "payments", "n", "200"])
    monkeypatch.setattr(
        "sys.stdin", _Terminal("SELECT count(*)\nFROM orders;\nSELECT nothing;\nSELECT 'on';\n")
    )
    code, out, err = run("sql", orders)
    assert code == 0
    assert "200" in out
    assert "on" in out
    assert err.startswith("tiered: Binder Error")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("SELECT * FROM ordrs",), 3, "has no topic ordrs; did you mean orders?"),
        (("SELEC 1",), 2, "syntax error"),
        (("SELECT 1", "--at-version", "999"), 3, "999"),
        (("SELECT 1", "--broker", "other"), 3, "other"),
    ],
)
def test_errors_are_one_line(
    run: Run, orders: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = run("sql", orders, *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert err.startswith("tiered: ")
    assert err.count("\n") == 1


def test_progress_of_a_long_statement_is_shown_on_a_terminal(
    run: Run, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketmq_tiered.cli.sql.PROGRESS_AFTER_S", 0.0)
    question = "SELECT count(*), sum(hash(text, range)) > 0 FROM orders, range(1000000)"
    for stderr, words in ((_Terminal(), ["read: 100%", " messages"]), (io.StringIO(), [])):
        monkeypatch.setattr("sys.stderr", stderr)
        assert run("sql", orders, "--csv", question)[0] == 0
        assert all(word in stderr.getvalue() for word in words) and bool(stderr.getvalue()) == bool(words)


LONG = {
    "scan": "SELECT sum(hash(a.text, b.text)) FROM orders a, orders b, range(1000000)",
    "sort": "COPY (SELECT o.*, r.range FROM orders o, range(20000) r ORDER BY hash(text, r.range), text) TO 'a.csv'",
    "cross join": "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE hash(a.range, b.range) % 7 = 3",
}


@pytest.mark.parametrize("attempt", sweep(range(20), fast=[0]))
@pytest.mark.parametrize("kind", LONG)
def test_an_interrupt_ends_a_statement_and_leaves_nothing(
    kind: str, attempt: int, orders: str, tmp_path: Path
) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    command = [sys.executable, "-m", "rocketmq_tiered.cli", "sql", orders, "--csv", LONG[kind]]
    environment = os.environ | {"TMPDIR": str(spill)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as asked:
        while not any(spill.iterdir()):
            time.sleep(0.02)
        time.sleep(random.Random(f"{kind} {attempt}").uniform(0.2, 4))
        assert asked.poll() is None
        asked.send_signal(signal.SIGINT)
        sent_s = time.monotonic()
        _, err = asked.communicate(timeout=60)
        took_s = time.monotonic() - sent_s
    assert (asked.returncode, err) == (130, b"tiered: interrupted\n")
    assert list(tmp_path.rglob("*")) == [spill]
    assert took_s < 1 or os.getloadavg()[0] > 2 * (os.cpu_count() or 1)

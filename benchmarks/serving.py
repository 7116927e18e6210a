"""Rate and cost of serving: ``python -m benchmarks.serving --out serving.jsonl``.

In one run, of the same messages (1 KiB, batches of 32, 1 and 4 queues): a real broker that has them hot in its page
cache, and `tiered serve` over their archive, from the warm cache and cold (a new process, page cache dropped), each
read by the same clients: a bare socket, Java's DefaultMQPullConsumer and DefaultLitePullConsumer. Then a thousand
connections that read slowly. Every figure is a JSON line; a table and the targets follow. Needs Java and Maven. Owns
the order.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cold_read_parts import drop_directory
from benchmarks.machine import await_quiet
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.serving_report import figures, summarize, table
from tests.servers.child import ChildServer, free_port
from tests.servers.rocketmq import BROKER, RocketMq, run_java
from tiered.settings.sections import Settings

VERSION = "5.3.3"
TOPIC = "live0"
QUEUES = 4
BATCH = 32
BODY_BYTES = 1024
NAMES = ("--cluster", "LiveCluster", "--broker", BROKER)
LOADS_MAX = 5
TIERED = Path(sys.executable).parent / "tiered"


@dataclass(frozen=True)
class Plan:
    """What to measure and where to work. ``warm_end``: offsets of a queue that warm reads go round in."""

    work: Path
    clients: list[str]
    queues: list[int]
    messages: int
    warm_end: int
    seconds: float
    runs: int
    slow: int
    quiet_wait_s: float


@dataclass(frozen=True)
class Target:
    """A server to read from. ``name_server``: where Java clients ask for routes."""

    name: str
    address: str
    name_server: str
    pid: int


def main() -> int:
    """Measure, print the table, return 1 when a target is missed."""
    options = _parser().parse_args()
    plan = Plan(
        options.work.resolve(),
        options.clients.split(","),
        [int(one) for one in options.queues.split(",")],
        options.messages,
        options.warm_end,
        options.seconds,
        options.runs,
        options.slow,
        options.quiet_wait,
    )
    shutil.rmtree(plan.work, ignore_errors=True)
    plan.work.mkdir(parents=True)
    return record(options.out, measure(plan), summarize, table)


def measure(plan: Plan) -> Iterator[Row]:
    """Rows as they are measured."""
    broker = RocketMq(VERSION, plan.work / "broker", {"mappedFileSizeCommitLog": 1 << 30})
    broker.start()
    try:
        broker.create_topic(TOPIC, QUEUES)
        _load(broker, plan)
        url = f"file://{plan.work}/archive"
        broker.broker.stop(timeout_s=40)  # so that everything is on disk and dispatched
        subprocess.run(
            [str(TIERED), "backfill", str(broker.store), url, *NAMES], check=True, capture_output=True
        )
        broker.broker.start()
        hot = Target("broker", broker.broker_address, broker.name_server_address, broker.broker.pid)
        for run in range(plan.runs):
            with _Served(plan, url) as served:
                yield from (row | {"run": run} for row in _read_rows(plan, hot, served.target, url))
    finally:
        broker.stop()
    if plan.slow:
        yield _slow_row(plan, url)


def _load(broker: RocketMq, plan: Plan) -> None:
    """Send the messages, and a tenth more for each queue to have its part; and again what a busy broker refused."""
    left = plan.messages * 11 // 10
    for _ in range(LOADS_MAX):
        left = _refused(broker, left)
        if not left:
            return
    raise RuntimeError(f"the broker refused {left} of {plan.messages} messages {LOADS_MAX} times")


def _refused(broker: RocketMq, messages: int) -> int:
    """Send so many messages; returns how many the broker refused. It ends with its standard input, which is kept
    open."""
    sizes = ("1", str(QUEUES), str(messages), str(BODY_BYTES), "4", "0", str(BATCH), str(8 * MIB), "0")
    command = broker.java_command("Load", broker.name_server_address, BROKER, *sizes)
    environment = {**os.environ, "ROCKETMQ_HOME": str(broker.directory)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as sending:
        assert sending.stdout is not None
        (last,) = [line.split() for line in sending.stdout if line.startswith("DONE")]
    return int(last[2])


class _Served:
    """`tiered serve` of the archive; the page cache is dropped before it starts."""

    def __init__(self, plan: Plan, url: str) -> None:
        drop_directory(plan.work / "archive")
        port = free_port()
        self._address = f"127.0.0.1:{port}"
        command = [sys.executable, "-m", "rocketmq_tiered.cli", "serve", url, *NAMES, "--bind", self._address]
        command += ["--set", "admin.port=0"]
        root = {"PYTHONPATH": str(Path(__file__).parent.parent)}
        self._server = ChildServer(
            "tiered serve", command, root, plan.work / "serve.log", lambda: _listens(port)
        )

    def __enter__(self) -> _Served:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def target(self) -> Target:
        """Its address; it is its own name server."""
        return Target("warm", self._address, self._address, self._server.pid)


def _read_rows(plan: Plan, hot: Target, warm: Target, url: str) -> Iterator[Row]:
    """Compared figures are measured one right after the other, so that the machine changes little."""
    for client in plan.clients:
        for queues in plan.queues:
            for target in (hot, warm):
                await_quiet(plan.quiet_wait_s)
                yield _row(plan, client, target, queues, [])
            if client.startswith("bare"):
                yield _cold_row(plan, queues, url)


def _cold_row(plan: Plan, queues: int, url: str) -> Row:
    with _Served(plan, url) as served:
        await_quiet(plan.quiet_wait_s)
        target = served.target
        cold = Target("cold", target.address, target.name_server, target.pid)
        end = plan.messages // QUEUES // BATCH * BATCH
        return _row(plan, "bare", cold, queues, ["--once", "--end", str(end)])


def _row(plan: Plan, client: str, target: Target, queues: int, more: list[str]) -> Row:
    found = (
        _bare(plan, target, queues, more)
        if client.startswith("bare")
        else _java(plan, client, target, queues)
    )
    if found["wrong"]:
        raise RuntimeError(f"{client} read {found['wrong']} wrong answers from {target.name}")
    return figures({"what": "read", "client": client, "server": target.name, "queues": queues, **found})


def _bare(plan: Plan, target: Target, queues: int, more: list[str]) -> Row:
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving_client",
        target.address,
        TOPIC,
        "--pid",
        str(target.pid),
        "--queues",
        str(queues),
        "--batch",
        str(BATCH),
        "--end",
        str(plan.warm_end),
        "--seconds",
        str(plan.seconds),
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _java(plan: Plan, client: str, target: Target, queues: int) -> Row:
    output = run_java(
        VERSION,
        plan.work,
        "PullSpeed",
        target.name_server,
        client,
        TOPIC,
        str(queues),
        str(BATCH),
        str(plan.warm_end),
        str(plan.seconds),
        str(plan.seconds),
        str(target.pid),
    )
    row: Row = json.loads(next(line for line in output.splitlines() if line.startswith('{"messages"')))
    return row


def _slow_row(plan: Plan, url: str) -> Row:
    settings = Settings()
    with _Served(plan, url) as served:
        status = Path(f"/proc/{served.target.pid}/status").read_text("ascii", "replace")
        idle = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024
        more = ["--slow", str(plan.slow), "--queues", str(QUEUES)]
        row = _bare(plan, served.target, QUEUES, more)
    budget = idle + settings.fetch.memory_bytes + settings.serve.memory_bytes // 10
    return {"what": "slow", "queues": QUEUES, "idle_rss_bytes": idle, "budget_bytes": budget, **row}


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _parser() -> argparse.ArgumentParser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rocketmq-tiered"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=main.__doc__)
    parser.add_argument("--clients", default="bare,pull,lite")
    parser.add_argument("--queues", default="1,4", help=f"at most {QUEUES}")
    parser.add_argument("--messages", type=int, default=256_000, help="of all queues")
    parser.add_argument(
        "--warm-end", type=int, default=16_000, help="warm reads: so many messages of each queue"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of warm-up, and of measuring")
    parser.add_argument(
        "--runs", type=int, default=3, help="measure everything this often; medians are shown"
    )
    parser.add_argument("--slow", type=int, default=1000, help="connections that read slowly; 0: none")
    parser.add_argument("--out", type=Path, default=Path("serving.jsonl"), help="one JSON object a line")
    parser.add_argument("--work", type=Path, default=cache / "bench-serving", help="emptied first")
    parser.add_argument(
        "--quiet-wait",
        type=float,
        default=0.0,
        metavar="S",
        help="before each figure, wait up to S seconds for an idle machine",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

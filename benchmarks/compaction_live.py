"""Compaction beside a live broker: ``python -m benchmarks.compaction_live --out compaction_live.jsonl``.

A broker gets 20,000 messages a second; `tiered run` archives them, serves clients from the archive and compacts what it
has. Compaction runs and is paused by turns, so that each window with it has a neighbour without. Compared are publish
latency (from stored to visible, of the oldest message of each commit) and the pulls of a client, warm (the same 256
messages again and again) and cold (all queues from their begin). Windows with work on an index file are repeated: it
takes the uploader 5 to 20 s, and would fall into some windows only. At last `tiered compact --apply` runs beside it, as
another process. Every figure is a JSON line, the last one the summary. Needs Java and Maven. Owns the order and the
limits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import busy_core_s, note, process_core_s
from benchmarks.recording import loaded
from benchmarks.report import Row
from tests.servers.child import free_port
from tests.servers.rocketmq import BROKER, RocketMq
from tiered.catalog.commit import CommitKind
from tiered.remoting.command import RemotingCommand, decode, encode

VERSION = "5.3.3"
TOPICS, QUEUES = 4, 16
RATE, BATCH, BODY_BYTES, POOL_BYTES = 20_000, 100, 100, 8 << 20
AGING_BATCH_AGE_MS = 100
"""Of the archive's first objects, which are compacted later."""
MIN_AGE_MS, EVERY_MS = 5_000, 5_000
WINDOWS_MAX = 8
"""Attempts at a window without work on index files."""
PULL_EVERY_S, COLD_EVERY = 0.01, 4
WARM_OFFSETS = 256
SETTLE_S = 3.0
"""Excluded from every window."""
RATIO_MAX, LOST_MAX = 1.2, 1.0
PULL_MESSAGE, SUCCESS = 11, 0
START_S = 120.0
FOLLOWING_MS = 1_000


@dataclass(frozen=True)
class Window:
    """A part of the run, with or without compaction."""

    is_compacting: bool
    begun_ms: int
    ended_ms: int
    cores: float
    compaction_cores: float
    """Of the children of `tiered run`."""
    load_cores: float
    """Of the broker, the producer and the client that pulls."""
    others_cores: float
    pulls: Sequence[tuple[bool, float]]
    """(is cold, ms) of each pull."""


def main() -> int:
    """Measure; returns 1 when a limit is exceeded."""
    options = _parser().parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    rows = list(measure(options))
    with options.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(loaded(row)) + "\n" for row in rows)
    print(json.dumps(rows[-1], indent=2))
    return int(bool(rows[-1]["missed"]))


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each window, and the summary."""
    broker = RocketMq(VERSION, options.work / "broker", {"mappedFileSizeCommitLog": 1 << 30})
    broker.start()
    try:
        for number in range(TOPICS):
            broker.create_topic(f"live{number}", QUEUES)
        with _producer(broker, options.work / "producer.out") as producer:
            with _tiered(broker, options, AGING_BATCH_AGE_MS):
                time.sleep(options.aging_seconds)
            with _tiered(broker, options, options.batch_age_ms) as tiered:
                yield from _windows(options, tiered, producer, broker)
    finally:
        broker.stop()


@dataclass
class _Tiered:
    """`tiered run`."""

    process: subprocess.Popen[bytes]
    address: str
    gate: Path
    events_path: Path

    def events(self, begun_ms: int = 0, ended_ms: int = 1 << 60) -> list[Row]:
        """What it said, in this time."""
        found = map(json.loads, self.events_path.read_text("utf-8").splitlines())
        return [row for row in found if begun_ms <= row["at_ms"] < ended_ms]


def _windows(
    options: argparse.Namespace, tiered: _Tiered, producer: _Producer, broker: RocketMq
) -> Iterator[Row]:
    load = [broker.broker.pid, producer.pid, os.getpid()]
    puller = _Puller(tiered.address, options.aged_offsets)
    puller.pull_for(5.0)
    rows: list[Row] = []
    sent = producer.acked, time.monotonic()
    for pair in range(options.pairs):
        for is_compacting in (False, True) if pair % 2 == 0 else (True, False):
            if is_compacting:
                tiered.gate.touch()
            for _ in range(WINDOWS_MAX):
                puller.pull_for(SETTLE_S)
                window = _window(is_compacting, tiered, load, puller, options.seconds)
                if not _is_indexing(tiered, window):
                    break
            tiered.gate.unlink(missing_ok=True)
            is_indexing = _is_indexing(tiered, window)
            rows.append({"what": "window", "pair": pair, "indexing": is_indexing, **_figures(window, tiered)})
            note(json.dumps(rows[-1]))
            yield rows[-1]
    rate = (producer.acked - sent[0]) / (time.monotonic() - sent[1])
    rounds = [row for row in tiered.events() if row["what"] == "round" and not row["is_void"]]
    lost = _lost(tiered.events())
    beside: Row = {"rounds": 0, "lost_versions": 0}
    if not options.run_only:
        begun_ms = _now_ms()
        beside |= _compact_beside(options, puller)
        events = tiered.events(begun_ms)
        beside |= {"lost_versions": _lost(events), **_publish(events)}
        yield {"what": "other_process", **beside}
    yield summarize(rows, rate, rounds, lost, beside, options.batch_age_ms)


def _is_indexing(tiered: _Tiered, window: Window) -> bool:
    """Whether an index file was written in any part of ``window``."""
    mine = [row for row in tiered.events(ended_ms=window.ended_ms) if row["what"] == "indexing"]
    return bool(mine) and (mine[-1]["at_ms"] >= window.begun_ms or not mine[-1]["has_ended"])


def _window(
    is_compacting: bool, tiered: _Tiered, load: Sequence[int], puller: _Puller, seconds: float
) -> Window:
    pid = tiered.process.pid
    before_s, begun_s, begun_ms = _core_s(pid, load), time.monotonic(), _now_ms()
    pulls = puller.pull_for(seconds)
    took_s = time.monotonic() - begun_s
    used = ((b - a) / took_s for a, b in zip(before_s, _core_s(pid, load), strict=True))
    busy, own, children, *of_load = used
    others = max(0.0, busy - own - children - sum(of_load))
    return Window(is_compacting, begun_ms, _now_ms(), own, children, sum(of_load), others, pulls)


def _core_s(pid: int, load: Sequence[int]) -> list[float]:
    """Of all, of process ``pid``, of its children, and of the processes ``load``."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()
    ended_s = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    living_s = sum(process_core_s(int(child)) for path in listed for child in path.read_text().split())
    return [busy_core_s(), process_core_s(pid), ended_s + living_s, *map(process_core_s, load)]


def _figures(window: Window, tiered: _Tiered) -> Row:
    events = tiered.events(window.begun_ms, window.ended_ms)
    seconds = (window.ended_ms - window.begun_ms) / 1000
    found: Row = {
        "compacting": window.is_compacting,
        "seconds": round(seconds, 1),
        **_publish(events),
        "lost_versions": _lost(events),
        "cores": round(window.cores, 2),
        "compaction_cores": round(window.compaction_cores, 2),
        "load_cores": round(window.load_cores, 2),
        "others_cores": round(window.others_cores, 2),
    }
    for name, is_cold in (("warm", False), ("cold", True)):
        times_ms = [ms for cold, ms in window.pulls if cold == is_cold]
        found |= {f"{name}_pulls": len(times_ms), f"{name}_p50_ms": _quantile(times_ms, 0.5)}
        found |= {f"{name}_p99_ms": _quantile(times_ms, 0.99), f"{name}_worst_ms": _quantile(times_ms, 1)}
    return found


def _publish(events: Sequence[Row]) -> Row:
    times_ms = [float(row["publish_ms"]) for row in events if row["what"] == "commit"]
    return {
        "commits": len(times_ms),
        "publish_p50_ms": _quantile(times_ms, 0.5),
        "publish_p99_ms": _quantile(times_ms, 0.99),
        "publish_worst_ms": _quantile(times_ms, 1),
    }


def _lost(events: Sequence[Row]) -> int:
    return sum(row["what"] == "lost" and row["kind"] == CommitKind.APPEND for row in events)


COMPARED = ("publish_p50_ms", "publish_p99_ms", "warm_p99_ms", "cold_p99_ms")


def summarize(
    rows: Sequence[Row], rate: float, rounds: Sequence[Row], lost: int, beside: Row, batch_age_ms: int
) -> Row:
    """The medians of the windows, the median of the pairs' ratios, and what exceeds its limit."""
    found: Row = {"what": "compaction_live", "batch_age_ms": batch_age_ms, "messages_per_s": round(rate)}
    missed = []
    for name in COMPARED:
        alone, beside_it = (
            [row[name] for row in rows if row["compacting"] == which] for which in (False, True)
        )
        ratios = [b / a for a, b in zip(alone, beside_it, strict=True)]
        found[name] = [round(statistics.median(values), 2) for values in (alone, beside_it)]
        found[f"{name.removesuffix('_ms')}_ratio"] = round(statistics.median(ratios), 3)
        found[f"{name.removesuffix('_ms')}_ratios"] = [round(ratio, 2) for ratio in ratios]
        if statistics.median(ratios) > RATIO_MAX:
            missed.append(name)
    of_other = beside["lost_versions"] / max(1, beside["rounds"])
    if lost > LOST_MAX * len(rounds) or of_other > LOST_MAX:
        missed.append("lost_versions")
    if not rounds:
        missed.append("rounds")
    found |= {
        "rounds": len(rounds),
        "moved_bytes": sum(row["bytes"] for row in rounds),
        "lost_versions": lost,
        "ratio_max": RATIO_MAX,
    }
    found |= {"rounds_of_other_process": beside["rounds"], "lost_to_other_process": beside["lost_versions"]}
    return found | {"missed": missed}


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2) if ordered else 0.0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- the processes --------------------------------------------------------------------------------------------


@contextmanager
def _tiered(broker: RocketMq, options: argparse.Namespace, batch_age_ms: int) -> Iterator[_Tiered]:
    work: Path = options.work
    address = f"127.0.0.1:{free_port()}"
    gate, events = work / "gate", work / f"events-{batch_age_ms}.jsonl"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gated_run",
        str(gate),
        str(events),
        "run",
        "--store",
        str(broker.store),
        "--url",
        _url(options),
        "--state-dir",
        str(work / "state"),
        "--broker-conf",
        str(broker.broker_conf),
    ]
    settings = {
        "OFFLOAD__BATCH_AGE_MS": batch_age_ms,
        "SERVE__BIND": address,
        "SERVE__ADVERTISE": address,
        "READ__POLICY": "FORCE",
        "COMPACTION__EVERY_MS": EVERY_MS,
        "COMPACTION__MIN_AGE_MS": MIN_AGE_MS,
        "ADMIN__PORT": 0,
    }
    with (work / "tiered.log").open("ab") as log:
        process = subprocess.Popen(command, env=_environment(settings), stdout=log, stderr=log)
    try:
        tiered = _Tiered(process, address, gate, events)
        deadline_s = time.monotonic() + START_S
        while not events.exists() or not _follows(tiered.events(), batch_age_ms):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"tiered run does not follow: {(work / 'tiered.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield tiered
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _follows(events: Sequence[Row], batch_age_ms: int) -> bool:
    """Whether the uploader has caught up."""
    times_ms = [row["publish_ms"] for row in events if row["what"] == "commit"]
    return bool(times_ms) and times_ms[-1] < batch_age_ms + FOLLOWING_MS


def _environment(settings: Mapping[str, object]) -> dict[str, str]:
    names = {f"TIERED_{name}": str(value) for name, value in settings.items()}
    return {**os.environ, **names, "PYTHONPATH": str(Path(__file__).parent.parent)}


def _url(options: argparse.Namespace) -> str:
    return f"file://{options.work}/archive"


def _compact_beside(options: argparse.Namespace, puller: _Puller) -> Row:
    """`tiered compact --apply` as another process, while the pulls continue."""
    command = [sys.executable, "-m", "rocketmq_tiered.cli", "compact", _url(options), "--apply", "--json"]
    begun_s = time.monotonic()
    environment = _environment({"COMPACTION__MIN_AGE_MS": MIN_AGE_MS})
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        pulls: list[tuple[bool, float]] = []
        while process.poll() is None:
            pulls += puller.pull_for(0.5)
        out, error = process.communicate()
    if process.returncode:
        raise RuntimeError(f"tiered compact failed: {error.decode()[-2000:]}")
    done = json.loads(out)
    return {
        "rounds": done["rounds"],
        "objects": done["objects"],
        "seconds": round(time.monotonic() - begun_s, 1),
        "warm_p99_ms": _quantile([ms for is_cold, ms in pulls if not is_cold], 0.99),
        "cold_p99_ms": _quantile([ms for is_cold, ms in pulls if is_cold], 0.99),
    }


@dataclass
class _Producer:
    """Load.java."""

    pid: int
    output: Path

    @property
    def acked(self) -> int:
        """Messages acknowledged, up to about a second ago."""
        lines = [line for line in self.output.read_text().splitlines() if line.startswith("RATE ")]
        return int(lines[-1].split()[1]) if lines else 0


@contextmanager
def _producer(broker: RocketMq, output: Path) -> Iterator[_Producer]:
    command = broker.java_command(
        "Load",
        broker.name_server_address,
        BROKER,
        str(TOPICS),
        str(QUEUES),
        str(1 << 40),
        str(BODY_BYTES),
        "4",
        str(RATE),
        str(BATCH),
        str(POOL_BYTES),
        "0",
    )
    with output.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
    try:
        yield _Producer(process.pid, output)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


class _Puller:
    """One client of the archive: a pull each PULL_EVERY_S, of the same messages, and each COLD_EVERY-th time the next
    messages of a reader that walks through all queues up to ``end``. One that is late does not catch up."""

    def __init__(self, address: str, end: int) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end, self._number = end, 0
        self._queue, self._offset = 1, 0

    def pull_for(self, seconds: float) -> list[tuple[bool, float]]:
        """Whether each pull was cold, and how long it took, in ms."""
        found = []
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self._number += 1
            is_cold = self._number % COLD_EVERY == 0
            begun_s = time.perf_counter()
            if is_cold:
                self._offset = self._pull(f"live{self._queue // QUEUES}", self._queue % QUEUES, self._offset)
            else:
                self._pull("live0", 0, self._number * 32 % WARM_OFFSETS)
            found.append((is_cold, 1000 * (time.perf_counter() - begun_s)))
            if self._offset >= self._end:
                self._queue, self._offset = self._queue % (TOPICS * QUEUES - 1) + 1, 0
            time.sleep(PULL_EVERY_S)
        return found

    def _pull(self, topic: str, queue_id: int, offset: int) -> int:
        """The offset of the next pull."""
        fields = {
            "consumerGroup": "G_bench",
            "topic": topic,
            "queueId": str(queue_id),
            "queueOffset": str(offset),
            "maxMsgNums": "32",
            "sysFlag": "4",
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": "*",
            "subVersion": "0",
            "expressionType": "TAG",
        }
        self._socket.sendall(encode(RemotingCommand(PULL_MESSAGE, self._number, ext_fields=fields)))
        data = self._exactly(int.from_bytes(self._exactly(4), "big"))
        answer = decode(data[: 4 + int.from_bytes(data[1:4], "big")])
        if answer.code != SUCCESS:
            raise ValueError(f"{topic} queue {queue_id} at {offset}: code {answer.code} {answer.remark}")
        return int(answer.ext_fields["nextBeginOffset"])

    def _exactly(self, count: int) -> bytes:
        data = self._socket.recv(count, socket.MSG_WAITALL)
        if len(data) < count:
            raise ConnectionError("the server closed the connection")
        return data


def _parser() -> argparse.ArgumentParser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rocketmq-tiered"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compaction_live", description=main.__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="of windows without and with compaction")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    parser.add_argument("--aging-seconds", type=float, default=80.0, help="of small objects before")
    parser.add_argument("--aged-offsets", type=int, default=8_000, help="that cold pulls read of each queue")
    parser.add_argument("--batch-age-ms", type=int, default=500)
    parser.add_argument("--run-only", action="store_true", help="without `tiered compact`")
    parser.add_argument("--out", type=Path, default=Path("compaction_live.jsonl"))
    parser.add_argument("--work", type=Path, default=cache / "bench-compaction-live", help="emptied first")
    return parser


if __name__ == "__main__":
    sys.exit(main())

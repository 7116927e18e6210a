"""Writes consume queues and kills itself: ``python -m tests.process.killed_rewrite PATH ACTION KIND report|rename N``,
at the Nth report of progress or rename. A process of its own, because RocksDB does not survive a fork."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import uploader.queue_units
from rocketmq_tiered.process import consume_queues
from tiered.broker_store.conf import read_broker_conf
from tiered.broker_store.store import open_broker_store
from tiered.consume_queue.store import StoreKind

WINDOW_BYTES = 1 << 20


def kill_at(path: Path, action: str, kind: StoreKind, *, event: str, at: int) -> None:
    """Run it in a process that must die by the kill."""
    command = [
        sys.executable,
        "-m",
        "tests.process.killed_rewrite",
        str(path),
        action,
        kind.value,
        event,
        str(at),
    ]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def main() -> None:
    path, action, kind, event, at = sys.argv[1:]
    steps, rename = 0, Path.rename

    def step(_: object = None, __: object = None) -> None:
        nonlocal steps
        steps += 1
        if steps == int(at):
            os.kill(os.getpid(), signal.SIGKILL)

    def stepping(source: Path, target: Path) -> Path:
        step()
        return rename(source, target)

    if event == "rename":
        Path.rename = stepping  # type: ignore[assignment, method-assign]
    uploader.queue_units.WINDOW_BYTES = WINDOW_BYTES  # type: ignore[misc]
    consume_queues.FLUSH_INTERVAL_S = 0.0  # type: ignore[misc]
    conf = read_broker_conf(Path(path) / "broker.conf")
    with open_broker_store(Path(path) / "store", conf=conf) as store:
        write = {"build": consume_queues.build, "convert": consume_queues.convert}[action]
        write(consume_queues.plan_of(store, StoreKind(kind)), step if event == "report" else lambda *_: None)


if __name__ == "__main__":
    main()

"""How soon a restored broker serves everything: ``python -m benchmarks.broker_start --version 5.3.3``.

A real broker starts on an empty directory, on a restored store with written consume queues, and on one whose consume
queues it must build. It is ready when it has booted and each queue has its last offset. Owns this one experiment.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import rocketmq_tiered
from benchmarks.archive_targets import open_target
from benchmarks.backfill import NAMES, TIERED, run_backfill
from benchmarks.recording import loaded
from benchmarks.report import Row
from benchmarks.stores import PROFILES, ensure_store
from tests.servers.rocketmq import RocketMq
from tiered.errors import UnavailableError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode

READY_S_MAX = 2.0
"""More than an empty broker takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a broker with written queues is not ready in time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broker_start", description=main.__doc__)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="B")
    parser.add_argument("--scale", type=float, default=3.0)
    parser.add_argument("--version", default="5.3.3")
    parser.add_argument("--queues", default="file", help="file or rocksdb")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, default=Path("broker_start.jsonl"))
    options = parser.parse_args(arguments)
    work: Path = options.work
    store = ensure_store(work / "stores", PROFILES[options.profile].scaled(options.scale))
    file_bytes = max(path.stat().st_size for path in (store.path / "commitlog").iterdir())
    conf = work / "broker.conf"
    conf.write_text(f"mappedFileSizeCommitLog={file_bytes}\n")
    with open_target("file", work) as target:
        run_backfill(store, target, work)
        with closing(rocketmq_tiered.open(target.url)) as archive:
            ends = {(one.topic, one.queue_id): one.max_offset for one in archive.queues()}
        rows = []
        for case in ("empty", options.queues, "none"):
            directory = work / "started"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            settings: dict[str, object] = {}
            if case != "empty":
                command = [
                    TIERED,
                    "restore",
                    target.url,
                    directory / "store",
                    *NAMES,
                    "--broker-conf",
                    conf,
                    "--consume-queue",
                    case,
                    "--json",
                ]
                said = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
                settings = json.loads(said.stdout)["brokerConf"]
            if "rocksdb" in (options.queues, case):
                settings["storeType"] = "defaultRocksDB"
            settings["mappedFileSizeCommitLog"] = file_bytes
            rows.append(_started(options.version, directory, settings, {} if case == "empty" else ends))
            rows[-1] |= {"case": case, "version": options.version, "log_bytes": store.log_bytes}
            shutil.rmtree(directory)
            print(rows[-1], flush=True)
    with options.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(loaded(row)) + "\n" for row in rows)
    return int(rows[1]["ready_s"] - rows[0]["ready_s"] > READY_S_MAX)


def _started(
    version: str, directory: Path, settings: dict[str, object], ends: dict[tuple[str, int], int]
) -> Row:
    kept = {name: value for name, value in settings.items() if not name.startswith("storePath")}
    broker = RocketMq(version, directory, kept)
    broker.name_server.start()
    begun_s = time.perf_counter()
    try:
        broker.broker.start()
        booted_s = time.perf_counter() - begun_s
        with closing(BrokerClient(broker.broker_address, 30)) as client:
            for (topic, queue_id), end in ends.items():
                while _max_offset(client, topic, queue_id) < end:
                    time.sleep(0.05)
        return {"booted_s": booted_s, "ready_s": time.perf_counter() - begun_s}
    finally:
        broker.broker.kill()
        broker.stop()


def _max_offset(client: BrokerClient, topic: str, queue_id: int) -> int:
    try:
        fields = {"topic": topic, "queueId": str(queue_id)}
        return int(client.call(RequestCode.GET_MAX_OFFSET, fields).ext_fields["offset"])
    except UnavailableError:
        return -1


if __name__ == "__main__":
    sys.exit(main())

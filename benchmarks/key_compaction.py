"""Key compaction of messages without bodies worth mentioning: ``python -m benchmarks.key_compaction``.

A synthetic store with random keys is archived and compacted; a real broker compacts a smaller one, and so do we. Owns
this one experiment: memory, processor time of reading the keys and of a whole pass, rounds, objects left.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.backfill import NAMES, TIERED
from benchmarks.json_bodies import BODY_BYTES_MIN, decimal_digits
from benchmarks.machine import note, process_core_s, run_child
from benchmarks.recording import loaded
from benchmarks.report import Row
from benchmarks.synthetic_store import StoreSpec, StoreWriter
from tests.servers.rocketmq import RocketMq
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode

RULE = ("--set", 'topics.rules=[{"pattern": "*", "key_compaction": "on"}]')
RATE_MIN, MEMORY_MAX = 300_000, (256 + 64) << 20
"""Messages a second on a core while keys are read; resident bytes."""
QUEUES = 4


class KeyedStore(StoreWriter):
    """Each message of a queue has one of ``keys`` keys, by chance."""

    keys = 1

    def _tails(self, indices: NDArray[np.int64], tags: NDArray[np.int64]) -> NDArray[np.void]:
        mixed = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = ((mixed >> np.uint64(20)) % np.uint64(self.keys)).astype(np.int64)
        tails = super()._tails(indices, tags)
        properties = tails["properties"]
        at = bytes(properties[0]).index(b"K" + b"%010d" % int(indices[0]))
        properties[:, at + 1 : at + 11] = decimal_digits(numbers, 10)
        return tails


def main() -> int:
    """Measure; returns 1 when a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.key_compaction", description=main.__doc__)
    parser.add_argument("--messages", type=int, default=100_000_000)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--broker-messages", type=int, default=1_000_000, help="0: without a broker")
    parser.add_argument("--version", default="5.3.3")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, default=Path("key_compaction.jsonl"))
    options = parser.parse_args()
    rows = [compacted(options.work, options.messages, options.keys)] if options.messages else []
    if options.broker_messages:
        count, keys = options.broker_messages, options.broker_messages // 10
        rows += [compacted(options.work, count, keys), by_broker(options.work, count, keys, options.version)]
    with options.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(loaded(row)) + "\n" for row in rows)
    return int(
        any(
            row.get("read_rate", RATE_MIN) < RATE_MIN or row.get("peak_bytes", 0) > MEMORY_MAX
            for row in rows[:1]
        )
    )


def store_of(path: Path, messages: int, keys: int) -> Path:
    """A store whose queues have about ``keys`` keys together."""
    shutil.rmtree(path, ignore_errors=True)
    spec = StoreSpec(topics=1, queues_per_topic=QUEUES, body_bytes=BODY_BYTES_MIN, file_bytes=256 << 20)
    writer = KeyedStore(path, spec)
    writer.keys = max(1, keys // QUEUES)
    writer.append(messages)
    writer.close()
    return path


def compacted(work: Path, messages: int, keys: int) -> Row:
    """Archive so many messages and compact them."""
    store, url = store_of(work / "keyed", messages, keys), f"file://{(work / 'keyed-archive').resolve()}"
    shutil.rmtree(work / "keyed-archive", ignore_errors=True)
    batch = f"offload.batch_bytes={max(1 << 20, messages * 4)}"  # some fifty commits
    command = [TIERED, "backfill", store, url, *NAMES, "--set", batch, "--json"]
    subprocess.run(command, check=True, capture_output=True)
    shutil.rmtree(store)
    command = [
        TIERED,
        "compact-keys",
        url,
        *NAMES,
        *RULE,
        "--older-than",
        "0",
        "--spool",
        str(work),
        "--json",
    ]
    read, done = (run_child([str(word) for word in [*command, *more]]) for more in ([], ["--apply"]))
    found = json.loads(done.output)
    row: Row = {
        "by": "archive",
        "messages": messages,
        "keys": found["keys"],
        "kept": found["newMessages"],
        "read_cpu_s": read.cpu_s,
        "read_rate": found["messages"] / read.cpu_s,
        "read_s": read.wall_s,
        "pass_s": done.wall_s,
        "pass_cpu_s": done.cpu_s,
        "read_peak_bytes": read.peak_rss_bytes,
        "peak_bytes": max(read.peak_rss_bytes, done.peak_rss_bytes),
        "rounds": found["rounds"],
        "spooled_bytes": found["spooledBytes"],
        "others_cores": done.others_cores,
        "objects": sum(1 for _ in (work / "keyed-archive").rglob("*.so")),
    }
    note(json.dumps(row))
    shutil.rmtree(work / "keyed-archive")
    return row


def by_broker(work: Path, messages: int, keys: int, version: str) -> Row:
    """A broker builds its compaction log of the same messages, and compacts it."""
    directory = work / "keyed-broker"
    shutil.rmtree(directory, ignore_errors=True)
    store = store_of(directory / "store", messages, keys)
    shutil.rmtree(store / "consumequeue")
    table = json.loads((store / "config" / "topics.json").read_text())
    for config in table["topicConfigTable"].values():
        config["attributes"] = {"cleanup.policy": "COMPACTION"}
    (store / "config" / "topics.json").write_text(json.dumps(table))
    settings = {
        "enableCompaction": "true",
        "compactionScheduleInternal": 1000,
        "compactionMappedFileSize": 8 << 20,
        "compactionCqMappedFileSize": 46 * 40_000,
        "mappedFileSizeCommitLog": 256 << 20,
    }
    broker = RocketMq(version, directory, settings | {"fileReservedTime": 876_000})
    begun_s = time.perf_counter()
    try:
        broker.start()
        topic = next(iter(table["topicConfigTable"]))
        with closing(BrokerClient(broker.broker_address, 30)) as client:
            ends = [(messages - number + QUEUES - 1) // QUEUES for number in range(QUEUES)]
            for queue, end in enumerate(ends):
                fields = {"topic": topic, "queueId": str(queue)}
                while int(client.call(RequestCode.GET_MAX_OFFSET, fields).ext_fields["offset"]) < end:
                    time.sleep(0.05)
        path = store / "compaction" / "position-checkpoint"
        seen, quiet_s = "", time.perf_counter()
        while time.perf_counter() - quiet_s < 15:  # no round in so long: all closed files are compacted
            now = path.read_text() if path.exists() else ""
            if now != seen:
                seen, quiet_s = now, time.perf_counter()
            time.sleep(0.1)
        row: Row = {
            "by": f"broker {version}",
            "messages": messages,
            "log_and_rounds_s": quiet_s - begun_s,
            "cpu_s": process_core_s(broker.broker.pid),
            "offsets": seen.count("_"),
        }
        note(json.dumps(row))
        return row
    finally:
        broker.broker.kill()
        broker.stop()
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())

"""Many retired brokers on three nodes of `tiered mount`: memory, requests, registrations, and a node's death.

    python -m benchmarks.mounts [--brokers 200] [--queues 500] DIRECTORY

A real name server; archives have catalogs and no data objects, as no consumer reads.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.synthetic_history import SyntheticHistory
from rocketmq_tiered.process.mount_report import mount_rows
from rocketmq_tiered.server.mount.node_lease import BrokerName, NodeLog, announce_archive
from tests.servers.child import free_port_block
from tests.servers.rocketmq import RocketMq
from tiered.clock import Clock
from tiered.formats import fastjson
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.remoting.client import BrokerClient
from tiered.settings.sections import Settings

NODES = 3
IDLE_S = 60.0
STANDS_S = 20.0
"""Nothing has moved for so long: the nodes are balanced."""
DAY_S = 86_400
CLUSTER = "DefaultCluster"


def main() -> int:
    """Measure and print one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--brokers", type=int, default=200)
    parser.add_argument("--queues", type=int, default=500)
    options = parser.parse_args()
    url = f"file://{options.directory / 'archives'}"
    store = open_store(url, StoreOptions(Settings().object_store))
    for number in range(options.brokers):
        _retired(store, BrokerName(CLUSTER, f"b{number:04d}"), options.queues)
    names = RocketMq("5.3.3", options.directory / "rocketmq")
    names.name_server.start()
    nodes = {
        f"n{number}": _node(url, f"n{number}", names.name_server_address, options) for number in range(NODES)
    }
    try:
        _measure(store, names.name_server_address, nodes, options.brokers)
    finally:
        for process in nodes.values():
            process.kill()
            process.wait()
        names.name_server.stop()
    return 0


def _retired(store: ObjectStore, name: BrokerName, queues: int) -> None:
    own = PrefixedStore(store, archive_prefix(*name))
    history = SyntheticHistory(own, queues, active=queues, broker=name.broker)
    history.cycle()
    history.writer.release(retires=True)
    announce_archive(store, name, queues)


def _node(url: str, name: str, name_server: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "rocketmq_tiered.cli",
        "mount",
        url,
        "--name-servers",
        name_server,
        "--node",
        name,
        "--advertise",
        "127.0.0.1",
        "--set",
        "mount.bind=127.0.0.1",
        "--set",
        "admin.port=0",
        "--set",
        f"mount.first_port={free_port_block(options.brokers + 8)}",
    ]
    with (options.directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))


def _measure(
    store: ObjectStore, name_server: str, nodes: dict[str, subprocess.Popen[bytes]], brokers: int
) -> None:
    began_s = time.monotonic()
    _until(lambda: len(_listed(name_server)) == brokers)
    print(f"all registered after {time.monotonic() - began_s:.0f} s")
    held, since_s = _held(store), time.monotonic()
    while time.monotonic() - since_s < STANDS_S:
        time.sleep(0.5)
        if (now := _held(store)) != held:
            held, since_s = now, time.monotonic()
    print(f"balanced after {since_s - began_s:.0f} s: {dict(held)}")
    before, keys = _versions(store), {info.key for info in store.list("")}
    time.sleep(IDLE_S)
    renewals = sum(_versions(store).values()) - sum(before.values())
    others = [
        key for key in {info.key for info in store.list("")} - keys if not key.startswith("mount.nodes/")
    ]
    print(f"PUTs a day: {renewals * DAY_S / IDLE_S:.0f} of leases, {len(others) * DAY_S / IDLE_S:.0f} others")
    for name, process in nodes.items():
        status = Path(f"/proc/{process.pid}/status").read_text()
        threads, rss = (status.partition(f"{word}:")[2].split()[0] for word in ("Threads", "VmRSS"))
        print(f"{name}: {_held(store)[name]} brokers, {int(rss) // 1024} MiB, {threads} threads")
    address = next(row.record.address for row in mount_rows(store))
    topics = BrokerClient(address, 5.0).topics() or {}
    print(f"a registration: {len(json.dumps(topics))} bytes of {len(topics)} topics, every 30 s")
    victim = next(iter(nodes))
    lost = {row.record.broker: row.record.address for row in mount_rows(store) if row.node == victim}
    nodes[victim].kill()
    began_s = time.monotonic()
    _until(lambda: all(_listed(name_server).get(broker, at) != at for broker, at in lost.items()))
    print(f"{len(lost)} brokers of a killed node registered again after {time.monotonic() - began_s:.1f} s")


def _held(store: ObjectStore) -> Counter[str]:
    return Counter({f"n{number}": 0 for number in range(NODES)}) + Counter(
        row.node for row in mount_rows(store) if row.node
    )


def _versions(store: ObjectStore) -> dict[str, int]:
    return {
        node: lease.version for node, lease in NodeLog(store, "", Clock(wall_ms=lambda: 0)).newest().items()
    }


def _listed(name_server: str) -> dict[str, str]:
    client = BrokerClient(name_server, 20.0)
    try:
        table = fastjson.loads(client.call(106).body or b"{}").get("brokerAddrTable", {})
    finally:
        client.close()
    return {name: data["brokerAddrs"].get("0", "") for name, data in table.items()}


def _until(condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "timed out"
        time.sleep(0.5)


if __name__ == "__main__":
    raise SystemExit(main())

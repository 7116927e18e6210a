"""Java consumers of messages that expire, in archive and proxy mode: they continue at the queue's new minimum, with
nothing else skipped."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_tiered.cli import main
from rocketmq_tiered.server.wire.codes import RequestCode, ResponseCode
from tests.end_to_end.offloading import backfill
from tests.integration import client_scene
from tests.integration.client_scene import (
    QUEUES,
    ask,
    begins_and_ends,
    delete_old_files,
    everything,
    need_clients,
    until,
)
from tests.integration.proxy_scene import proxy_beside_broker
from tests.integration.served_scene import Job, Served
from tests.servers.running_store import RunningStore
from tests.servers.tiered_serve import tiered_serve
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.settings.sections import OffloadSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = ("4.9.7", "5.5.0")
MANY_RUNS = OffloadSettings(batch_bytes=128 << 10, split_bytes=64 << 10, block_bytes=16 << 10)
RULES = 'topics.rules=[{"pattern": "t_keys", "max_bytes": "512KiB"}]'
BEGUN = 100
"""Messages of each queue that a group has read when more of them expire."""


def test_groups_below_the_floor_continue_at_the_minimum(
    real_store: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_clients(*VERSIONS)
    backfill(real_store("A") / "store", FileStore(tmp_path / "archive"), settings=MANY_RUNS)
    url = f"file://{tmp_path}/archive"
    server, address = tiered_serve(url, tmp_path)
    server.start()
    try:
        served = Served(tmp_path, url, address, server)
        everything = served.expected("t_keys")
        for version in VERSIONS:
            for queue_id in range(2):
                commit(address, f"G_{version[0]}", queue_id)
        limits = ("--set", RULES, "--set", "retention.min_archived=1ms", "--yes")
        assert main(["expire", url, *limits, "--apply", "--json"]) == 0
        expired = json.loads(capsys.readouterr().out)["rows"]
        left = served.expected("t_keys")
        assert min(line[1] for line in left) > BEGUN and left.total() == everything.total() - expired
        minimum = min(line[1] for line in left)
        until(lambda: shown_minimum(served) == minimum, "the server does not follow the archive", 30)
        for version in VERSIONS:
            for mode in ("push", "pull"):
                group = f"G_{version[0]}" if mode == "push" else f"G_{version[0]}_new"
                (rest,) = served.consume(version, Job(mode, "t_keys", left.total(), group))
                assert Counter(rest) == left, (version, mode)
        assert main(["gc", url, "--apply", "--grace", "0s"]) == 0
        (rest,) = served.consume("5.5.0", Job("lite", "t_keys", left.total(), "G_collected"))
        assert Counter(rest) == left
    finally:
        server.stop()
    assert main(["verify", url, "--full", "--strict"]) == 0


def commit(address: str, group: str, queue_id: int) -> None:
    """As a consumer that has read a part of the queue."""
    fields: dict[str, object] = {"consumerGroup": group, "topic": "t_keys", "commitOffset": BEGUN}
    code = RequestCode.UPDATE_CONSUMER_OFFSET
    assert ask(address, code, b"", **fields, queueId=queue_id).code == ResponseCode.SUCCESS


def shown_minimum(served: Served) -> int:
    """The smallest of the topic's minimum offsets, as mqadmin shows them."""
    (printed,) = served.mqadmin("5.5.0", "topicStatus -t t_keys")
    return min(int(line.split()[2]) for line in printed.splitlines() if line.startswith("fx-a"))


def test_groups_of_the_proxy_cross_the_floor(tmp_path: Path, minio_url: RunningStore) -> None:
    """Beside a broker that has deleted its oldest files: groups that are behind continue at the first message that the
    archive or the broker still has."""
    need_clients(*VERSIONS)
    with proxy_beside_broker(tmp_path, minio_url, {"cleanResourceInterval": 1000}, {}) as proxy:
        proxy.fill(4000, 500)
        proxy.wait_until_serving()
        delete_old_files(proxy)
        at_broker = settled(lambda: begins_and_ends(proxy, "live0")[0])
        begun = {version: f"G-begun-{version[0]}" for version in VERSIONS}
        before = {
            version: places(proxy.consume_all(version, [client_scene.Job("push", group, BEGUN)]))
            for version, group in begun.items()
        }
        rules = 'topics.rules=[{"pattern": "live0", "max_bytes": "1400KiB"}]'
        limits = ("--set", rules, "--set", "retention.min_archived=1ms", "--yes", "--apply")
        done = proxy.sidecar.tiered("expire", proxy.sidecar.url, *limits)
        assert done.returncode == 0, done.stderr
        state = load(proxy.sidecar.open_archive())
        floors = [min(bounds_of(state, queue)[0], first) for queue, first in enumerate(at_broker)]
        assert min(floors) > BEGUN and any(
            floor < first for floor, first in zip(floors, at_broker, strict=True)
        )
        left = everything(begins_and_ends(proxy, "live0")[1], floors)
        until(lambda: shown_floors(proxy.address) == floors, "the proxy does not follow the archive", 30)
        for version, group in begun.items():
            jobs = [
                client_scene.Job("push", group, 10**6, idle_s=10),
                client_scene.Job("lite", f"G-new-{version[0]}", len(left)),
                client_scene.Job("pull", f"G-pull-{version[0]}", len(left)),
            ]
            rest, new, pulled = proxy.consume_all(version, jobs)
            assert set(places([rest])) | (set(before[version]) & left) == left, version
            assert Counter(places([new])) == Counter(places([pulled])) == Counter(left), version
        assert proxy.sidecar.stop() == 0, proxy.sidecar.log.read_text()[-2000:]
        verified = proxy.sidecar.tiered("verify", proxy.sidecar.url, "--full")
        assert verified.returncode == 0, verified.stdout


def places(found: list[list[list[str]]]) -> list[client_scene.Line]:
    """Queue id and offset of each message."""
    return [(int(fields[0]), int(fields[1])) for lines in found for fields in lines]


def bounds_of(state: CatalogState, queue_id: int) -> tuple[int, int]:
    """[minimum, maximum) of a queue of live0."""
    row = state.queue(QueueKey("live0", queue_id, 0))
    assert row is not None
    return int(row["min_queue_offset"]), int(row["end_queue_offset"])


def shown_floors(address: str) -> list[int]:
    """The minima of the queues of live0, as a server reports them."""
    answers = [
        ask(address, RequestCode.GET_MIN_OFFSET, topic="live0", queueId=queue) for queue in range(QUEUES)
    ]
    return [int(answer.ext_fields["offset"]) for answer in answers]


def settled(read: Callable[[], list[int]]) -> list[int]:
    """What ``read`` returns once it has not changed for a while: the broker deletes one file after the other."""
    found, since_s = read(), time.monotonic()
    while time.monotonic() - since_s < 5:
        time.sleep(0.5)
        if (now := read()) != found:
            found, since_s = now, time.monotonic()
    return found

"""Real brokers serve what `tiered restore` makes of an archive: every message, and new ones."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.fetcher.broker_store_writer import FILE_BYTES, WrittenStore
from tests.integration.restored_store import Original, Queue, differences, restored, tiered
from tests.maintenance.restored import archived, expected, written
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import java_classes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CASES = [
    ("G", "file"),
    ("A", "file"),
    ("C", "rocksdb"),
    ("E", "file"),
    ("B", "file"),
    ("D", "rocksdb"),
    ("K", "none"),
    ("A", "none"),
    ("G", "rocksdb"),
    ("A", "rocksdb"),
    ("C", "file"),
    ("G", "both"),
    ("D", "both"),
]


@pytest.fixture(params=CASES, ids="-".join)
def case(
    request: pytest.FixtureRequest, real_store: Callable[[str], Path], tmp_path: Path
) -> tuple[Original, str, Path]:
    name, queues = request.param
    original = Original(name, real_store(name))
    try:
        java_classes(original.version)
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ: {error}")
    original.backfill(f"file://{tmp_path}/archive")
    return original, queues, tmp_path


def test_a_broker_serves_every_message_and_its_archive_continues(case: tuple[Original, str, Path]) -> None:
    original, queues, directory = case
    url = f"file://{directory}/archive"
    settings = original.settings()
    if original.name == "K":
        settings["forceVerifyPropCRC"] = "true"
    if queues == "both":
        settings |= {"storeType": "default", "combineCQUseRocksdbForLmq": "true", "enableCompaction": "false"}
    wanted = sorted(original.truth.queues)
    if queues == "rocksdb":
        wanted = [queue for queue in wanted if queue[0] != "t_bcq"]
    arguments = ("--consume-queue", queues, "--index", "--broker-conf", original.directory / "broker.conf")
    with restored(original.version, url, directory / "broker", *arguments, settings=settings) as (
        broker,
        said,
    ):
        pulled = broker.pull(wanted)
        assert differences(original, pulled) == []
        assert said["messages"] >= sum(map(len, pulled.messages.values())) > 5_000
        for topic, key, found in islice(original.queries(), 20):
            assert set(found) <= broker.query(topic, key), (topic, key)
        offsets = original.group_offsets()
        for group, topic, queue_id in sorted(offsets)[:10]:
            wanted_offset = min(offsets[group, topic, queue_id], pulled.ranges[topic, queue_id][1])
            assert broker.consumer_offset(group, topic, queue_id) == wanted_offset
        end = broker.max_offset("t_one", 0)
        broker.send("t_one", "after the restore")
        broker.server.broker.kill()
        broker.server.broker.start()
        again = broker.pull(wanted)
        assert again.ranges["t_one", 0] == (pulled.ranges["t_one", 0][0], end + 1)
        assert again.messages["t_one", 0][:-1] == pulled.messages["t_one", 0]
        del again.messages["t_one", 0], pulled.messages["t_one", 0]
        assert again.messages == pulled.messages
        broker.server.broker.kill()
        assert "1 message," in tiered("backfill", directory / "broker" / "store", url)
        assert "clean" in tiered("verify", url, "--full")


SELECTIONS = [
    (version, *arguments)
    for version in ("5.3.3", "4.9.7", "5.5.0")
    for arguments in (
        ("--consume-queue", "file"),
        ("--consume-queue", "rocksdb"),
        ("--layout", "compact"),
        ("--topics", "t1"),
        ("--since", "1700000001500"),
    )
    if (version, arguments[1]) != ("4.9.7", "rocksdb")
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=" ".join)
def test_queues_with_gaps_and_queues_of_which_nothing_is_kept(
    selection: tuple[str, ...], tmp_path: Path
) -> None:
    version, *arguments = selection
    store = written(tmp_path / "written", messages=2_000, gap_at=20, begin_file=2)
    archived(store, tmp_path / "archive")
    conf, url = tmp_path / "broker.conf", f"file://{tmp_path}/archive"
    conf.write_text(f"mappedFileSizeCommitLog={FILE_BYTES}\nmappedFileSizeConsumeQueue=1000\n")
    kept = kept_of(store, *arguments)
    with restored(version, url, tmp_path / "broker", *arguments, "--broker-conf", conf, settings={}) as (
        broker,
        _,
    ):
        for _ in range(2):
            pulled = broker.pull(sorted(kept))
            assert pulled.ranges == {queue: bounds for queue, (bounds, _) in kept.items()}
            assert {queue: [line[:2] for line in lines] for queue, lines in pulled.messages.items()} == {
                queue: lines for queue, (_, lines) in kept.items()
            }
            broker.server.broker.kill()
            broker.server.broker.start()
        for queue, (bounds, _) in kept.items():
            if queue[1] == 0:
                broker.send(queue[0], "after the restore")
                assert broker.max_offset(*queue) == bounds[1] + 1
        again = broker.pull(sorted(kept))
        assert all(
            len(again.messages[queue]) == len(lines) + (queue[1] == 0) for queue, (_, lines) in kept.items()
        )
        broker.server.broker.kill()
        assert "3 messages," in tiered("backfill", tmp_path / "broker" / "store", url, *NAMES)
        assert "clean" in tiered("verify", url, "--full")


NAMES = ("--cluster", "FxCluster", "--broker", "fx-a")


def kept_of(
    store: WrittenStore, option: str, value: str
) -> dict[Queue, tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Minimum and maximum of each queue, and offset and size of each message, that a restore with an option keeps."""
    found = {}
    for queue, records in expected(store).items():
        since = int(value) if option == "--since" else 0
        end = max(records) + 1
        lines = [
            (offset, len(record))
            for offset, record in records.items()
            if int.from_bytes(record[56:64], "big") >= since and (option != "--topics" or queue[0] == value)
        ]
        found[queue] = ((lines[0][0] if lines else end, end), lines)
    return found

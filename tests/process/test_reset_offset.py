"""`tiered reset-offset`: groups are reset in archive mode and through a running server."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rocketmq_tiered
from fetcher.access import open_async_access
from rocketmq_tiered.cli import main
from rocketmq_tiered.process.group_reset import Start, StartKind
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.backend.served_archive import ServedArchive
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog, load_snapshot
from rocketmq_tiered.server.retries.retry_log import RetryLog
from rocketmq_tiered.server.retries.retry_queue import RetryLimits, RetryQueues
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tiered.clock import Clock
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand
from tiered.settings.sections import ServeSettings, Settings

TOPIC = "t_order"


@pytest.fixture(scope="module")
def archive(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("reset-offset")
    backfill(real_store("A") / "store", FileStore(directory))
    return f"file://{directory}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Server:
    """`tiered serve`'s service in a thread."""

    def __init__(self, url: str) -> None:
        self._access = open_async_access(url, cluster="", broker="", settings=Settings())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.service: ArchiveService
        self.address = ""

    def start(self) -> None:
        self._thread.start()
        self.address = self._run(self._start())

    async def _start(self) -> str:
        archive = ServedArchive(self._access)
        await archive.load()
        offsets = GroupOffsets(GroupLog(self._access.store, "test", Clock(wall_ms=_now_ms)), lease_ms=60_000)
        retries = RetryQueues(
            RetryLog(self._access.store, "test"), offsets, RetryLimits(), Clock(wall_ms=_now_ms)
        )
        self.service = ArchiveService(archive, offsets, retries, ServeSettings(bind="127.0.0.1:0"))
        return await self.service.start()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def stop(self) -> None:
        self._run(self.service.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._access.close()


@pytest.fixture
def server(archive: str) -> Iterator[Server]:
    found = Server(archive)
    found.start()
    yield found
    found.stop()


def reset_offset(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[int, tuple[int | None, int]], str]:
    """Exit code, queue id -> (before, offset), and the error."""
    code = main(["reset-offset", *arguments, "--topic", TOPIC, "--json"])
    printed = capsys.readouterr()
    if code != 0:
        return code, {}, printed.err
    queues = json.loads(printed.out)["queues"]
    return code, {queue["queueId"]: (queue["before"], queue["offset"]) for queue in queues}, printed.err


def bounds(url: str) -> dict[int, tuple[int, int]]:
    with rocketmq_tiered.open(url) as found:
        return {
            queue.key[1]: (found.queue(*queue.key[:2]).min_offset, found.queue(*queue.key[:2]).max_offset)
            for queue in found.queues(TOPIC)
        }


def by_time(url: str, time_ms: int) -> dict[int, int]:
    with rocketmq_tiered.open(url) as found:
        return {
            queue.key[1]: found.queue(*queue.key[:2]).offset_by_time(time_ms) for queue in found.queues(TOPIC)
        }


def snapshot(url: str) -> dict[int, int]:
    store = PrefixedStore(FileStore(Path(url.removeprefix("file://"))), archive_prefix(CLUSTER, BROKER))
    return load_snapshot(store).offsets.get(("G", TOPIC), {})


@given(st.integers(0, 100), st.integers(0, 100), st.integers(-10, 300), st.sampled_from(StartKind))
def test_a_start_is_within_the_queue(minimum: int, length: int, value: int, kind: StartKind) -> None:
    maximum = minimum + length
    found = Start(kind, value).within(minimum, maximum, by_time=value)
    assert minimum <= found <= maximum
    if kind is not StartKind.EARLIEST and minimum <= value <= maximum:
        assert found == value


def test_archive_mode(archive: str, capsys: pytest.CaptureFixture[str]) -> None:
    ends = bounds(archive)
    code, planned, _ = reset_offset(
        capsys, archive, "--group", "G", "--offset", "240", "--dry-run", "--new-group"
    )
    assert code == 0 and snapshot(archive) == {}
    assert planned == {queue: (None, min(240, end)) for queue, (_, end) in ends.items()}
    assert reset_offset(capsys, archive, "--group", "G", "--offset", "240", "--new-group")[1] == planned
    assert snapshot(archive) == {queue: after for queue, (_, after) in planned.items()}
    _, moved, _ = reset_offset(capsys, archive, "--group", "G", "--earliest")
    assert moved == {queue: (planned[queue][1], start) for queue, (start, _) in ends.items()}
    when_ms = 1_795_227_705_400
    _, moved, _ = reset_offset(capsys, archive, "--group", "G", "--time", str(when_ms))
    assert {queue: after for queue, (_, after) in moved.items()} == by_time(archive, when_ms)
    assert any(
        start < after < end for (start, end), (_, after) in zip(ends.values(), moved.values(), strict=True)
    )


def test_a_running_server_is_gone_through(
    archive: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = reset_offset(capsys, archive, "--group", "G", "--earliest")
    assert code == 5 and "--serve" in error
    place = ("--serve", server.address, "--group", "G")
    ends = bounds(archive)
    for arguments, wanted in (
        (("--earliest",), {queue: start for queue, (start, _) in ends.items()}),
        (("--offset", "240"), {queue: min(240, end) for queue, (_, end) in ends.items()}),
        (("--time", "1795227705400"), by_time(archive, 1_795_227_705_400)),
    ):
        before = snapshot(archive)
        code, planned, _ = reset_offset(capsys, *place, *arguments, "--dry-run")
        assert code == 0 and snapshot(archive) == before
        code, moved, _ = reset_offset(capsys, *place, *arguments)
        assert (code, {queue: after for queue, (_, after) in moved.items()}) == (0, wanted)
        assert moved == planned
        assert snapshot(archive) == wanted  # durable


def test_what_does_not_exist_and_wrong_usage(
    archive: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ((archive,), ("--serve", server.address)):
        assert (
            main(["reset-offset", *place, "--group", "G", "--topic", "nix", "--earliest", "--dry-run"]) == 3
        )
    assert main(["reset-offset", "--group", "G", "--topic", TOPIC, "--earliest"]) == 2
    assert (
        main(["reset-offset", archive, "--serve", "h:1", "--group", "G", "--topic", TOPIC, "--earliest"]) == 2
    )
    assert main(["reset-offset", "--serve", "nowhere", "--group", "G", "--topic", TOPIC, "--earliest"]) == 2
    assert main(["reset-offset", "--serve", "h:99999", "--group", "G", "--topic", TOPIC, "--earliest"]) == 2
    assert (
        main(["reset-offset", "--serve", "127.0.0.1:1", "--group", "G", "--topic", TOPIC, "--earliest"]) == 4
    )
    capsys.readouterr()


@pytest.mark.parametrize("served", [False, True])
def test_an_unknown_group_exists_only_once_it_is_said_to_be_new(
    served: bool, archive: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--serve", request.getfixturevalue("server").address) if served else (archive,)
    group = ("--group", f"misspelled-{served}", "--earliest")
    code, _, error = reset_offset(capsys, *place, *group)
    assert code == 3 and f"misspelled-{served} is unknown" in error and "--new-group" in error
    assert reset_offset(capsys, *place, *group, "--new-group")[0] == 0
    assert reset_offset(capsys, *place, *group)[0] == 0


class StubbornBroker(BrokerClient):
    """A live broker: one queue, group at 150, a member online; it moves no group below its first message, 100."""

    def __init__(
        self, address: str, timeout_s: float, credentials: object = None, tls: object = None
    ) -> None:
        pass

    def close(self) -> None:
        pass

    def call(
        self, code: int, ext_fields: Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        ext_fields = ext_fields or {}
        answer = {30: {"offset": "200"}, 31: {"offset": "50"}, 14: {"offset": "150"}}.get(code)
        if code == 105:
            route = {
                "brokerDatas": [{"brokerName": "b", "brokerAddrs": {"0": "127.0.0.1:1"}}],
                "queueDatas": [{"brokerName": "b", "readQueueNums": 1}],
            }
            return RemotingCommand(0, 1, body=json.dumps(route).encode())
        if code == 222:
            if int(ext_fields["queueId"]) >= 0 and int(ext_fields["offset"]) < 100:
                return RemotingCommand(1, 1, remark="Target offset not in consume queue range")
            moved = max(100, int(ext_fields["offset"]))
            return RemotingCommand(
                0, 1, body=b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t_order"}:%d}}' % moved
            )
        return RemotingCommand(0, 1, ext_fields=answer or {})


def test_a_group_moved_elsewhere_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rocketmq_tiered.process.group_reset.BrokerClient", StubbornBroker)
    code, moved, _ = reset_offset(capsys, "--serve", "127.0.0.1:1", "--group", "G", "--offset", "120")
    assert (code, moved) == (0, {0: (150, 120)})
    code, _, error = reset_offset(capsys, "--serve", "127.0.0.1:1", "--group", "G", "--offset", "60")
    assert code == 1 and "stop the group's consumers" in error

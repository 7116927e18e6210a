"""Resets of groups beside a live broker, also where only the archive has the message."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.proxy.group_resets import GroupResets
from rocketmq_tiered.server.wire.request import Response
from rocketmq_tiered.server.wire.turns import AT_ONCE_MAX
from tests.server.proxy.proxy_pulls import STORED, Scene, beside_a_broker
from tests.server.proxy.scripted_broker import stored_ms_of
from tests.server.serving_peer import RecordingPeer, request
from tiered.clock import Clock
from tiered.formats import fastjson
from tiered.remoting.command import RemotingCommand
from tiered.remoting.command import RequestCode as R

BROKERS_OWN = RemotingCommand(0, 0, remark="the broker's own", body=b"{}")


class Case:
    """A broker that has deleted the first messages, and one member of a group, if any."""

    def __init__(self, scene: Scene, *, checks_clients: bool = False) -> None:
        self.scene = scene
        self.clients = ClientTable(Clock(monotonic_s=lambda: 0.0))
        self.peer = RecordingPeer()
        self.minimum = scene.expire(150)
        self.resets = GroupResets(scene.router, scene.offsets, self.clients, checks_clients=checks_clients)
        row = f'{{"maxOffset":{STORED},"minOffset":{self.minimum},"lastUpdateTimestamp":0}}'
        queue = '{"brokerName":"b","queueId":0,"topic":"t"}'
        scene.broker.says[R.GET_TOPIC_STATS_INFO] = _answer(f'{{"offsetTable":{{{queue}:{row}}}}}')
        scene.broker.says[R.INVOKE_BROKER_TO_RESET_OFFSET] = BROKERS_OWN
        scene.broker.says[R.QUERY_CONSUMER_OFFSET] = RemotingCommand(0, 0, ext_fields={"offset": "7"})
        self.listed()

    def listed(self, *client_ids: str) -> None:
        """Members as the broker knows them."""
        found = _answer(json.dumps({"consumerIdList": client_ids})) if client_ids else RemotingCommand(1, 0)
        self.scene.broker.says[R.GET_CONSUMER_LIST_BY_GROUP] = found

    def join(self, consume_type: str | int = "CONSUME_PASSIVELY", language: str = "JAVA") -> None:
        """A member "c" here."""
        data = {
            "groupName": "g",
            "consumeType": consume_type,
            "messageModel": "CLUSTERING",
            "subscriptionDataSet": [],
        }
        sent = request(R.HEART_BEAT, self.peer, {"clientID": "c", "consumerDataSet": [data]})
        self.clients.heartbeat(replace(sent, command=replace(sent.command, language=language)))
        self.listed("c")
        self.peer.pushed.clear()

    async def reset(self, **fields: object) -> Response:
        """222."""
        ext = {"topic": "t", "group": "g", "timestamp": 0, "isForce": "true"} | fields
        asked = request(R.INVOKE_BROKER_TO_RESET_OFFSET, None, None, **ext)
        return await self.resets.reset(asked, self.scene.upstream)

    def new_offsets(self) -> list[int]:
        """Where the member is to continue."""
        found: list[int] = []
        for code, ext, body in self.peer.pushed:
            assert code == R.RESET_CONSUMER_CLIENT_OFFSET
            assert (ext["topic"], ext["group"]) == ("t", "g")
            found += _table(body).values()
        return found


def _answer(body: str) -> RemotingCommand:
    return RemotingCommand(0, 0, body=body.encode())


def _table(body: bytes) -> dict[int, int]:
    document: Any = fastjson.loads(body)
    return {fastjson.loads(key)["queueId"]: value for key, value in document["offsetTable"].items()}


def _moved(response: Response) -> dict[int, int]:
    return _table(b"".join(map(bytes, response.body)))


def is_brokers(response: Response) -> bool:
    return response.remark == BROKERS_OWN.remark


async def test_members_are_reset_into_the_archive(scene: Scene) -> None:
    case = Case(scene)
    case.join()
    time_ms = stored_ms_of(scene.store.records["t", 0][60])
    cases: list[tuple[dict[str, object], int]] = [
        ({}, 0),
        ({"timestamp": time_ms}, 60),
        ({"offset": 17, "queueId": 0}, 17),
        ({"offset": 3, "queueId": -1}, 3),
        ({"isForce": "false", "timestamp": time_ms}, 7),  # never further on than it is
    ]
    for fields, offset in cases:
        case.peer.pushed.clear()
        assert _moved(await case.reset(**fields)) == {0: offset}
        assert case.new_offsets() == [offset]
    assert scene.broker.commits == [], "they commit it themselves"


async def test_a_member_of_cpp_is_reset_in_its_own_form(scene: Scene) -> None:
    """It names its language by number, and reads the new offsets as a list."""

    case = Case(scene)
    case.join(1, "CPP")
    assert _moved(await case.reset(offset=17, queueId=0)) == {0: 17}
    ((_, _, body),) = case.peer.pushed
    row = {"topic": "t", "brokerName": "b", "queueId": 0, "offset": 17}
    assert json.loads(body) == {"offsetTable": [row]}


async def test_a_group_without_members_is_moved_by_commits(scene: Scene) -> None:
    case = Case(scene)
    assert _moved(await case.reset(offset=20, queueId=0)) == {0: 20}
    assert scene.broker.commits == [20]
    scene.broker.refuses[R.UPDATE_CONSUMER_OFFSET] = (16, "no")
    assert (await case.reset()).code == 16


def members_elsewhere(case: Case) -> None:
    case.join()
    case.listed("c", "another")


def members_only_elsewhere(case: Case) -> None:
    case.listed("another")


def lite_members(case: Case) -> None:
    case.join("CONSUME_ACTIVELY")


@pytest.mark.parametrize("prepare", [members_elsewhere, members_only_elsewhere, lite_members])
async def test_a_member_that_cannot_be_notified_is_not_moved(
    scene: Scene, prepare: Callable[[Case], None]
) -> None:
    """The broker would move the group to its own minimum, past what only the archive has."""

    case = Case(scene)
    prepare(case)
    refused = await case.reset()
    assert refused.code == 1 and "Stop the group's consumers" in (refused.remark or "")
    assert is_brokers(await case.reset(timestamp=-1))
    assert case.peer.pushed == [] and scene.broker.commits == []


async def test_within_what_the_broker_has_it_does_it_itself(scene: Scene) -> None:
    case = Case(scene)
    case.join()
    for fields in ({"timestamp": -1}, {"offset": case.minimum, "queueId": 0}, {"offset": STORED + 9}):
        assert is_brokers(await case.reset(**fields))
    checking = Case(scene, checks_clients=True)
    checking.join()
    assert is_brokers(await checking.reset())
    scene.policy("DISABLE")
    assert is_brokers(await case.reset())
    assert case.peer.pushed == checking.peer.pushed == []


class Slow:
    """A broker that takes 20 ms for an answer. ``most``: questions at once."""

    def __init__(self, upstream: Any) -> None:
        self._upstream, self.at_work, self.most = upstream, 0, 0

    async def call(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        await asyncio.sleep(0.02)
        self.at_work -= 1
        answer: RemotingCommand = await self._upstream.call(command, timeout_s)
        return answer


@pytest.mark.parametrize(
    "code", [R.INVOKE_BROKER_TO_RESET_OFFSET, R.GET_TOPIC_STATS_INFO, R.GET_CONSUME_STATS]
)
async def test_a_topic_of_many_queues_is_answered_while_the_tool_waits(tmp_path: Path, code: R) -> None:
    """mqadmin waits for five seconds; a queue takes several answers of the broker."""
    count = 128

    async with beside_a_broker(tmp_path, with_files=False) as scene:
        case = Case(scene)
        row = f'{{"maxOffset":{STORED},"minOffset":{case.minimum},"consumerOffset":5,"lastTimestamp":0}}'
        table = ",".join(
            f'{{"brokerName":"b","queueId":{queue_id},"topic":"t"}}:{row}' for queue_id in range(count)
        )
        scene.broker.says[R.GET_TOPIC_STATS_INFO] = _answer(f'{{"offsetTable":{{{table}}}}}')
        scene.broker.says[R.GET_CONSUME_STATS] = scene.broker.says[R.GET_TOPIC_STATS_INFO]
        upstream = Slow(scene.upstream)
        handler = (case.resets.handlers() | scene.offsets.handlers())[code]
        asked = request(
            code, None, None, topic="t", group="g", consumerGroup="g", timestamp=0, isForce="true"
        )
        async with asyncio.timeout(5):
            answer = await handler(asked, upstream)  # type: ignore[arg-type]
        assert answer is not None and answer.code == 0
        assert len(fastjson.loads(b"".join(map(bytes, answer.body)))["offsetTable"]) == count
        assert 1 < upstream.most <= AT_ONCE_MAX
        if code == R.INVOKE_BROKER_TO_RESET_OFFSET:
            assert len(scene.broker.commits) == count

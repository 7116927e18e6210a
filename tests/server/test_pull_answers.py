"""Codes and offsets a client is given, for every status: the rules that keep group offsets right."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.backend.backend import Bounds, TopicConfig
from rocketmq_tiered.server.backend.pull_handlers import (
    COMMIT_OFFSET,
    SUBSCRIPTION,
    SUSPEND,
    PullLimits,
    PullService,
    response_code,
)
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.groups.subscription_filter import filter_of
from rocketmq_tiered.server.wire.request import BadRequestError, Request, Response
from tests.server.serving_peer import request
from tiered.clock import Clock
from tiered.errors import UsageError
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import RequestCode, ResponseCode

S = PullStatus


@pytest.mark.parametrize(
    ("status", "push", "pull_api"),
    [
        (S.FOUND, 0, 0),
        (S.NO_MATCHED_MESSAGE, 20, 20),
        (S.OFFSET_TOO_SMALL, 20, 21),
        (S.OFFSET_OVERFLOW_BADLY, None, 21),
        (S.OFFSET_OVERFLOW_ONE, None, None),
        (S.NO_MESSAGE_IN_QUEUE, None, None),
        (S.NO_MATCHED_LOGIC_QUEUE, None, None),
    ],
)
def test_codes_by_status(status: PullStatus, push: int | None, pull_api: int | None) -> None:
    assert response_code(status, is_pull_api=False) == push
    assert response_code(status, is_pull_api=True) == pull_api


class ScriptedArchive:
    """Gives one answer after the other; the last one again and again."""

    cluster, broker = "c", "b"

    def __init__(self, answers: Sequence[PullResult]) -> None:
        self._answers = list(answers)
        self.wishes: list[PullRequest] = []
        self.on_change: Callable[[], None] = lambda: None

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 4, 4)}

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        return {"by sql": {}}

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        return Bounds(*self._answers[0][2:4])

    def pull_from_memory(self, pull_request: PullRequest) -> PullResult | None:
        self.wishes.append(pull_request)
        return self._answers[0]

    async def pull(self, pull_request: PullRequest) -> PullResult:
        self.wishes.append(pull_request)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.01))
        self.on_change()


class Scene:
    """A service over a scripted archive; a group ``known`` subscribes to tag a, ``all`` to everything."""

    def __init__(self, answers: Sequence[PullResult]) -> None:
        archive: Any = ScriptedArchive(answers)
        self.archive: ScriptedArchive = archive
        self.life = 0
        log = GroupLog(MemoryStore(), "one", Clock(wall_ms=lambda: 1), generation_of=lambda *_: self.life)
        self.offsets = GroupOffsets(log, lease_ms=60_000)
        clients = ClientTable(Clock(monotonic_s=lambda: 0.0))
        for group, expression, kind in (("known", "a", "TAG"), ("all", "*", "TAG"), ("by sql", "", "SQL92")):
            data = {"topic": "t", "subString": expression, "expressionType": kind, "subVersion": 5}
            document = {
                "clientID": "c",
                "consumerDataSet": [{"groupName": group, "subscriptionDataSet": [data]}],
            }
            clients.heartbeat(request(RequestCode.HEART_BEAT, body=document))
        routes = RouteTable(archive, "h:1")
        self.service = PullService(archive, routes, clients, self.offsets, PullLimits(hold_s_max=2.0))


def asked(**ext: object) -> Request:
    fields = {
        "topic": "t",
        "queueId": 0,
        "queueOffset": 10,
        "consumerGroup": "g",
        "maxMsgNums": 32,
        "sysFlag": SUSPEND,
        "suspendTimeoutMillis": 50,
    } | ext
    given: Any = {name: value for name, value in fields.items() if value is not None}
    return request(RequestCode.PULL_MESSAGE, **given)


def pull(answers: Sequence[PullResult], **ext: object) -> tuple[Response, ScriptedArchive]:
    async def run() -> tuple[Response, ScriptedArchive]:
        scene = Scene(answers)
        return await scene.service.pull(asked(**ext)), scene.archive

    return asyncio.run(run())


ODD = st.sampled_from(
    [
        None,
        "",
        "0",
        "1",
        "3",
        "4",
        "-1",
        "00",
        "+2",
        " 1",
        "\u0663",
        "1e3",
        "x",
        "5",
        "9" * 19,
        "9" * 30,
        "t",
        "g",
        "*",
        "a",
        "all",
        "known",
        "other",
        "TAG",
        "SQL92",
        "nothing",
    ]
)


@given(st.data())
def test_what_is_answered_at_once_is_what_the_handler_answers(data: st.DataObject) -> None:
    usual: dict[str, list[object]] = {
        "topic": ["t"],
        "consumerGroup": ["g", "all", "known"],
        "queueId": [0, 3],
        "queueOffset": [10],
        "sysFlag": [0, 4, 6, 7],
        "subscription": ["*", None, "a"],
        "maxMsgNums": [32, None, 0],
        "maxMsgBytes": [None, 1000, 0],
        "expressionType": ["TAG", None],
        "subVersion": [0, 5, 6],
        "commitOffset": [4, None],
    }
    ext = {name: data.draw(st.sampled_from(values)) for name, values in usual.items()}
    for name in data.draw(st.lists(st.sampled_from(sorted(usual)), max_size=2)):
        ext[name] = data.draw(ODD)

    async def run() -> None:
        scene, other = Scene([FOUND]), Scene([FOUND])
        await scene.offsets.claim()
        await other.offsets.claim()
        try:
            at_once = scene.service.pull_from_memory(asked(**ext))
        except BadRequestError:
            with pytest.raises(BadRequestError):
                await other.service.pull(asked(**ext))
            return
        if at_once is not None:
            assert await other.service.pull(asked(**ext)) == at_once
            assert scene.archive.wishes == other.archive.wishes
            assert scene.archive.wishes[0].expression == "*"
        place = str(ext["consumerGroup"]), str(ext["topic"])
        if at_once is not None:
            offsets, others = (
                [one.find(*place, queue) for queue in range(9)] for one in (scene.offsets, other.offsets)
            )
            assert offsets == others
        else:
            assert not scene.offsets._offsets

    asyncio.run(run())


@pytest.mark.parametrize(
    "ext", [{"consumerGroup": "all", "subVersion": 5}, {"sysFlag": 4}, {"sysFlag": 4, "maxMsgNums": None}]
)
def test_plain_pulls_are_answered_at_once(ext: dict[str, object]) -> None:
    response = Scene([FOUND]).service.pull_from_memory(asked(**ext))
    assert response is not None
    assert (response.code, response.ext["nextBeginOffset"]) == (0, "12")
    for unusual in (
        {"sysFlag": 4, "subscription": "a"},
        {"consumerGroup": "known"},
        {"consumerGroup": "all", "subVersion": 6},
    ):
        assert Scene([FOUND]).service.pull_from_memory(asked(**unusual)) is None


AT_END = PullResult(S.OFFSET_OVERFLOW_ONE, 10, 0, 10)
FOUND = PullResult(S.FOUND, 12, 0, 12, (b"abc", b"defg"), 2)


def test_a_pull_at_the_end_is_held_until_there_is_more() -> None:
    response, archive = pull([AT_END, AT_END, FOUND], suspendTimeoutMillis=2000)
    assert (response.code, list(response.body), len(archive.wishes)) == (0, [b"abc", b"defg"], 3)
    assert response.ext["nextBeginOffset"] == "12"


def test_a_pull_that_waited_in_vain_asks_again_at_the_same_offset() -> None:
    response, _ = pull([AT_END])
    assert (response.code, response.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "10")
    response, _ = pull([PullResult(S.OFFSET_OVERFLOW_BADLY, 7, 0, 7)])
    assert (response.code, response.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "10")


@given(st.sampled_from(list(PullStatus)), st.booleans(), st.integers(0, 50), st.integers(0, 50))
def test_only_users_of_the_pull_api_are_moved(
    status: PullStatus, is_pull_api: bool, low: int, length: int
) -> None:
    # Beyond the end, a smaller next offset means that the topic was recreated.
    next_offset = low + length if status is S.OFFSET_OVERFLOW_BADLY else low
    found = PullResult(status, next_offset, low, low + length, (b"x",))
    flags = SUBSCRIPTION if is_pull_api else 0
    response, _ = pull([found], sysFlag=flags)
    if response.code == ResponseCode.PULL_OFFSET_MOVED:
        assert is_pull_api
        assert status in (S.OFFSET_TOO_SMALL, S.OFFSET_OVERFLOW_BADLY)
    assert {"suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"} <= response.ext.keys()
    assert bool(response.body) == (response.code == 0)


def test_no_client_is_moved_back_to_an_end_that_may_be_behind_another_servers() -> None:
    beyond = PullResult(S.OFFSET_OVERFLOW_BADLY, 7, 0, 7)
    response, archive = pull([beyond, FOUND], sysFlag=SUBSCRIPTION)
    assert (response.code, len(archive.wishes)) == (0, 2)
    response, _ = pull([beyond, AT_END], sysFlag=SUBSCRIPTION)
    assert (response.code, response.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "10")
    response, archive = pull([beyond, beyond, FOUND], sysFlag=SUBSCRIPTION)
    assert (response.code, response.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "7")


BEYOND = PullResult(S.OFFSET_OVERFLOW_BADLY, 7, 3, 7)


async def recreated(answers: Sequence[PullResult], *, at_once: bool = True) -> Scene:
    """Group g consumed up to 10 of a queue that has been created again since, or is when it waits for more."""
    scene = Scene(answers)
    await scene.offsets.claim()
    scene.offsets.note("g", "t", 0, 10)

    def recreate() -> None:
        scene.life = 1

    if at_once:
        recreate()
    else:
        scene.archive.on_change = recreate
    return scene


@pytest.mark.parametrize("flags", [SUSPEND, SUBSCRIPTION | SUSPEND])
@pytest.mark.parametrize(
    ("answers", "at_once"),
    [
        ([BEYOND], True),
        ([AT_END, BEYOND], False),
        ([AT_END, PullResult(S.FOUND, 12, 3, 12, (b"of the new life",), 2)], False),
        ([AT_END, PullResult(S.OFFSET_OVERFLOW_ONE, 10, 3, 10)], False),
    ],
)
def test_a_consumer_of_an_earlier_generation_is_moved_to_the_beginning_of_the_new_one(
    flags: int, answers: list[PullResult], at_once: bool
) -> None:
    """Else it waits until the new one has grown so far, and continues behind messages it never got."""

    async def run() -> Response:
        scene = await recreated(answers, at_once=at_once)
        return await scene.service.pull(asked(sysFlag=flags, subscription="*", suspendTimeoutMillis=2000))

    response = asyncio.run(run())
    assert (response.code, response.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "3")


@pytest.mark.parametrize("unacked", [True, False])
async def test_a_commit_with_a_pull_is_not_of_an_earlier_generation(unacked: bool) -> None:
    scene = await recreated([FOUND])
    for committed, known in ((13, 0), (12, 12), (13, 13)):
        sent = asked(sysFlag=COMMIT_OFFSET | SUBSCRIPTION, subscription="*", commitOffset=committed)
        response = scene.service.pull_from_memory(sent) if unacked else await scene.service.pull(sent)
        assert response is not None and response.code == 0
        assert scene.offsets.find("g", "t", 0) == known


def test_what_cannot_be_served_is_said() -> None:
    assert pull([FOUND], topic="other")[0].code == ResponseCode.TOPIC_NOT_EXIST
    assert pull([FOUND], queueId=9)[0].code == ResponseCode.SYSTEM_ERROR
    assert pull([FOUND], queueOffset=-5)[0].code == ResponseCode.SYSTEM_ERROR
    assert pull([FOUND], expressionType="SQL92")[0].code == ResponseCode.SUBSCRIPTION_NOT_EXIST


@pytest.mark.parametrize(
    "ext",
    [
        {"sysFlag": SUBSCRIPTION, "expressionType": "SQL92"},
        {"sysFlag": SUBSCRIPTION, "expressionType": "SQL92", "subscription": ""},
        {"sysFlag": SUBSCRIPTION, "expressionType": "sql92", "subscription": "a > 1"},
        {"sysFlag": SUBSCRIPTION, "expressionType": "REGEX", "subscription": "*"},
        {"consumerGroup": "by sql", "subVersion": 4},
        {"consumerGroup": "by sql", "subVersion": 6},
        {"expressionType": "REGEX"},
    ],
)
def test_what_is_no_filter_by_tag_never_means_everything(ext: dict[str, object]) -> None:
    """Clients filter again by tag only."""
    response, archive = pull([FOUND], **ext)
    assert response.code == ResponseCode.SUBSCRIPTION_NOT_EXIST or all(
        _is_filter(pull_request.expression, pull_request.expression_type) for pull_request in archive.wishes
    )


def _is_filter(expression: str, expression_type: str) -> bool:
    try:
        return filter_of(expression, expression_type) is not None
    except UsageError:
        return True


def test_limits_bound_what_a_client_may_ask_for() -> None:
    _, archive = pull([FOUND], maxMsgNums=2**31, maxMsgBytes=2**31 - 1)
    assert (archive.wishes[0].count, archive.wishes[0].max_bytes) == (1024, 4 << 20)
    _, archive = pull([FOUND], sysFlag=SUBSCRIPTION, subscription="a || b")
    assert archive.wishes[0].expression == "a || b"

"""Codes and offsets a client is given, for every status: the rules that keep group offsets right."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.serving.archive_side import Bounds, PullFound, PullStatus, PullWish, TopicConfig
from fetcher.serving.group_state import GroupLog
from fetcher.serving.offset_handlers import GroupOffsets
from fetcher.serving.pull import SUBSCRIPTION, SUSPEND, PullLimits, PullService, answer_of
from fetcher.serving.routes import RouteTable
from fetcher.serving.session import ClientTable
from fetcher.serving.wire.codes import RequestCode, ResponseCode
from fetcher.serving.wire.request import Response
from tests.fetcher.serving.serving_peer import request
from tiered.object_store.memory import MemoryStore

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
    assert answer_of(status, is_pull_api=False) == push
    assert answer_of(status, is_pull_api=True) == pull_api


class ScriptedArchive:
    """Gives one answer after the other; the last one again and again."""

    cluster, broker = "c", "b"

    def __init__(self, answers: Sequence[PullFound]) -> None:
        self._answers = list(answers)
        self.wishes: list[PullWish] = []

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 4, 4)}

    async def pull(self, wish: PullWish) -> PullFound:
        self.wishes.append(wish)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.01))


def pull(answers: Sequence[PullFound], **ext: object) -> tuple[Response, ScriptedArchive]:
    async def run() -> tuple[Response, ScriptedArchive]:
        archive: Any = ScriptedArchive(answers)
        offsets = GroupOffsets(GroupLog(MemoryStore(), "one", lambda: 1), lease_ms=60_000)
        service = PullService(
            archive, RouteTable(archive, "h:1"), ClientTable(lambda: 0.0), offsets, PullLimits(hold_s_max=0.2)
        )
        fields = {
            "topic": "t", "queueId": 0, "queueOffset": 10, "consumerGroup": "g", "maxMsgNums": 32, "sysFlag": SUSPEND,
            "suspendTimeoutMillis": 50,
        } | ext  # fmt: skip
        return await service.pull(request(RequestCode.PULL_MESSAGE, **fields)), archive

    return asyncio.run(run())


AT_END = PullFound(S.OFFSET_OVERFLOW_ONE, 10, Bounds(0, 10))
FOUND = PullFound(S.FOUND, 12, Bounds(0, 12), (b"abc", b"defg"), 2)


def test_a_pull_at_the_end_is_held_until_there_is_more() -> None:
    response, archive = pull([AT_END, AT_END, FOUND])
    assert (response.code, list(response.body), len(archive.wishes)) == (0, [b"abc", b"defg"], 3)
    assert response.ext["nextBeginOffset"] == "12"


def test_a_pull_that_waited_in_vain_asks_again_at_the_same_offset() -> None:
    response, _ = pull([AT_END])
    assert (response.code, response.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "10")
    beyond = PullFound(S.OFFSET_OVERFLOW_BADLY, 7, Bounds(0, 7))
    response, _ = pull([beyond])
    assert (response.code, response.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, "10")


@given(st.sampled_from(list(PullStatus)), st.booleans(), st.integers(0, 50), st.integers(0, 50))
def test_only_users_of_the_pull_api_are_moved(
    status: PullStatus, is_pull_api: bool, low: int, length: int
) -> None:
    found = PullFound(status, low, Bounds(low, low + length), (b"x",))
    flags = SUBSCRIPTION if is_pull_api else 0
    response, _ = pull([found], sysFlag=flags)
    if response.code == ResponseCode.PULL_OFFSET_MOVED:
        assert is_pull_api
        assert status in (S.OFFSET_TOO_SMALL, S.OFFSET_OVERFLOW_BADLY)
    assert {"suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"} <= response.ext.keys()
    assert bool(response.body) == (response.code == 0)


def test_what_cannot_be_served_is_said() -> None:
    assert pull([FOUND], topic="other")[0].code == ResponseCode.TOPIC_NOT_EXIST
    assert pull([FOUND], queueId=9)[0].code == ResponseCode.SYSTEM_ERROR
    assert pull([FOUND], queueOffset=-5)[0].code == ResponseCode.SYSTEM_ERROR
    unknown = pull([FOUND], expressionType="SQL92")[0]
    assert unknown.code == ResponseCode.SUBSCRIPTION_NOT_EXIST


def test_limits_bound_what_a_client_may_ask_for() -> None:
    _, archive = pull([FOUND], maxMsgNums=2**31, maxMsgBytes=2**31 - 1)
    assert (archive.wishes[0].count, archive.wishes[0].max_bytes) == (1024, 4 << 20)
    _, archive = pull([FOUND], sysFlag=SUBSCRIPTION, subscription="a || b")
    assert archive.wishes[0].expression == "a || b"

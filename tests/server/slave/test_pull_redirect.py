"""Where a client of the slave goes next, never in circles and never past a message."""

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.policy.read_policy import BrokerSide, HeldOffsets, ReadPolicy, Situation
from rocketmq_tiered.server.backend.pull_handlers import SUSPEND
from rocketmq_tiered.server.slave.pull_redirect import (
    REPEAT_S,
    EmptyReplyPacer,
    RedirectContext,
    SlavePulls,
    next_id,
)
from rocketmq_tiered.server.slave.registration import MASTER_ID
from rocketmq_tiered.server.wire.request import Response
from tests.server.proxy.proxy_pulls import ARCHIVED, STORED, Scene, beside_a_broker
from tests.server.serving_peer import RecordingPeer, request
from tiered.clock import Clock
from tiered.remoting.command import RequestCode

OWN = 7
FORCE, DISABLE = ReadPolicy.FORCE, ReadPolicy.DISABLE
ranges = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: HeldOffsets(min(pair), max(pair)))
situations = st.builds(
    Situation,
    offset=st.integers(0, 60),
    is_system=st.booleans(),
    archived=st.none() | ranges,
    broker=st.sampled_from(BrokerSide),
    local=st.none() | ranges,
    is_local_record=st.booleans(),
    is_archive_behind=st.booleans(),
    is_expiring=st.booleans(),
)


@given(situations, st.sampled_from(ReadPolicy), st.booleans())
def test_no_client_is_sent_where_it_would_be_moved(
    situation: Situation, policy: ReadPolicy, is_available: bool
) -> None:
    found = next_id(OWN, policy, situation, is_master_available=is_available)
    assert found in (OWN, MASTER_ID)
    if found == OWN:
        return
    assert is_available and situation.broker not in (BrokerSide.AWAY, BrokerSide.UNREADABLE)
    if situation.is_system or policy is DISABLE:
        return  # never ours
    assert situation.archived is None or situation.offset not in situation.archived
    assert not (situation.local is not None and situation.offset < situation.local.min_offset)
    assert not (situation.local is not None and situation.is_expiring)
    assert not (situation.local is not None and situation.offset > situation.local.max_offset), "moved back"


@given(situations)
def test_what_is_archived_is_read_here(situation: Situation) -> None:
    if situation.archived is not None and situation.offset in situation.archived and not situation.is_system:
        assert next_id(OWN, FORCE, situation, is_master_available=True) == OWN


def test_a_consumer_goes_back_where_the_archive_ends() -> None:
    at_end = Situation(50, archived=HeldOffsets(0, 50), local=HeldOffsets(20, 50))
    assert next_id(OWN, FORCE, at_end, is_master_available=True) == MASTER_ID
    behind = Situation(50, archived=HeldOffsets(0, 50), local=HeldOffsets(60, 90))
    assert next_id(OWN, FORCE, behind, is_master_available=True) == OWN


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 1), st.integers(0, 1)), max_size=60))
def test_the_same_answer_is_sent_once_a_second_at_most(asked: list[tuple[float, int, int]]) -> None:
    repeats, now_s = EmptyReplyPacer(), 0.0
    sent: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
    for after_s, peer, offset in asked:
        now_s += after_s
        now_s += (wait_s := repeats.wait_s((1, f"g{peer}"), "t", 0, offset, now_s))
        assert 0 <= wait_s <= REPEAT_S
        sent[peer].append((offset, now_s))
    for answers in sent.values():
        for (before, at_s), (after, then_s) in itertools.pairwise(answers):
            assert before != after or then_s - at_s >= REPEAT_S - 1e-9


@dataclass
class Sent:
    """Pulls through the slave. ``slept``: how long answers were put off, all together."""

    scene: Scene
    pulls: SlavePulls
    peer: RecordingPeer = field(default_factory=RecordingPeer)
    is_available: bool = True
    well_at_s: float = 1e9
    slept_s: float = 0.0
    at_s: float = 0.0

    async def pull(
        self, offset: int, *, flags: int = SUSPEND, hold_ms: int = 50, topic: str = "t"
    ) -> Response:
        pulled = request(
            RequestCode.PULL_MESSAGE,
            self.peer,
            topic=topic,
            queueId=0,
            queueOffset=offset,
            consumerGroup="g",
            maxMsgNums=32,
            sysFlag=flags,
            suspendTimeoutMillis=hold_ms,
            commitOffset=0,
            subVersion=0,
            subscription="*",
        )
        found = await self.pulls.handlers()[RequestCode.PULL_MESSAGE](pulled, self.scene.upstream)
        assert found is not None
        return found


def sent_to(scene: Scene) -> Sent:
    async def sleep(seconds: float) -> None:
        sent.slept_s += seconds
        sent.at_s += seconds
        sent.is_available |= sent.at_s >= sent.well_at_s
        await asyncio.sleep(0)

    scene.policy("FORCE")
    sent = Sent(scene, None)  # type: ignore[arg-type]
    around = RedirectContext(
        OWN, lambda: sent.is_available, clock=Clock(monotonic_s=lambda: sent.at_s), sleep=sleep
    )
    sent.pulls = SlavePulls(scene.pulls.handlers(), scene.router, scene.views, around)
    return sent


def where(response: Response) -> tuple[int, int, int]:
    """(code, next offset, broker id)."""
    return response.code, int(response.ext["nextBeginOffset"]), int(response.ext["suggestWhichBrokerId"])


@pytest.mark.parametrize("with_files", [True, False])
async def test_a_redirected_consumer_reads_the_archive_here_and_the_rest_at_the_master(scene: Scene) -> None:
    sent, offset, got = sent_to(scene), 100, list[int]()
    while True:
        found = await sent.pull(offset)
        got += scene.numbers(found)
        code, offset, goes_to = where(found)
        assert code == 0 and found.version is None, "from the archive"
        if goes_to == MASTER_ID:
            break
    assert got == list(range(100, ARCHIVED)) and offset == ARCHIVED
    assert RequestCode.PULL_MESSAGE not in scene.broker.codes(), "and the master is left alone"


async def test_a_pinned_consumer_reads_everything_here_and_waits_here(scene: Scene) -> None:
    """It never follows a suggestion: what the archive does not have is the master's own answer, its wait included."""

    sent, offset, got = sent_to(scene), 0, list[int]()
    while offset < STORED:
        found = await sent.pull(offset)
        got += scene.numbers(found)
        assert where(found)[1] > offset
        offset = where(found)[1]
    assert got == list(range(STORED)) and sent.slept_s == 0
    assert where(await sent.pull(STORED, hold_ms=30)) == (19, STORED, MASTER_ID)
    before = len(scene.broker.requests)
    waiting = asyncio.create_task(sent.pull(STORED, hold_ms=20_000))
    await asyncio.sleep(0.3)
    assert not waiting.done() and len(scene.broker.requests) - before < 6
    scene.store.put("t", 0, b"new")
    scene.broker.grow()
    assert scene.numbers(await waiting) == [STORED]


async def test_no_client_goes_back_to_a_master_that_has_deleted_what_comes_next(scene: Scene) -> None:
    sent = sent_to(scene)
    scene.broker.minimum["t", 0] = minimum = scene.expire(STORED - 20)
    assert minimum > ARCHIVED
    scene.forget()
    assert where(await sent.pull(ARCHIVED - 10)) == (0, ARCHIVED, OWN)
    held = await sent.pull(ARCHIVED)
    assert where(held) == (20, ARCHIVED, OWN), "held at the same offset: it may yet be archived"
    await scene.commit_archive(scene.store.path)


async def test_while_the_master_is_away_clients_stay_and_are_held(scene: Scene) -> None:
    sent = sent_to(scene)
    await scene.broker.kill()
    sent.is_available = False
    assert where(await sent.pull(ARCHIVED - 10)) == (0, ARCHIVED, OWN)
    sent.at_s = sent.slept_s = 0.0
    scene.broker.requests.clear()
    for _ in range(3):
        assert where(await sent.pull(ARCHIVED, hold_ms=300)) == (19, ARCHIVED, OWN)
    assert sent.slept_s > 2 * REPEAT_S, "no hot loop, however little the client offered to wait"
    before_s = sent.slept_s
    assert where(await sent.pull(ARCHIVED + 5, hold_ms=15_000)) == (19, ARCHIVED + 5, OWN)
    assert sent.slept_s - before_s == pytest.approx(15)
    assert where(await sent.pull(7, topic="unknown", hold_ms=2_000)) == (19, 7, OWN)


async def test_who_waits_for_the_master_is_answered_when_it_is_back(scene: Scene) -> None:
    sent = sent_to(scene)
    sent.is_available = False
    sent.well_at_s = 3.0
    assert scene.numbers(await sent.pull(ARCHIVED, hold_ms=15_000)) == list(range(ARCHIVED, ARCHIVED + 32))
    assert 3.0 <= sent.slept_s < 4.0


async def test_topics_that_are_the_broker_s_are_handed_back_at_once(scene: Scene) -> None:
    sent = sent_to(scene)
    scene.policy("DISABLE")
    found = await sent.pull(10)
    assert scene.numbers(found) == list(range(10, 42)) and where(found) == (0, 42, MASTER_ID)


async def test_no_client_is_sent_to_a_master_whose_log_was_cut_back(tmp_path: Path) -> None:
    """It would move him back to its end, and give him again what he has."""
    async with beside_a_broker(tmp_path, with_files=False) as scene:
        sent = sent_to(scene)
        for number in range(ARCHIVED - 20, STORED):
            del scene.store.records["t", 0][number]
        found = await sent.pull(ARCHIVED - 40)
        assert where(found)[1:] == (ARCHIVED - 8, OWN)
        assert where(await sent.pull(ARCHIVED - 8)) == (0, ARCHIVED, OWN)
        assert where(await sent.pull(ARCHIVED))[1:] == (ARCHIVED, OWN)

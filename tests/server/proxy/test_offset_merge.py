"""What a broker's answers mean, and that no walk along the line passes a message that archive or broker has."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fetcher.policy.archived_queues import ArchivedQueue
from fetcher.policy.read_policy import (
    BrokerSide,
    LocalView,
    OffsetRange,
    ReadPolicies,
    ReadPolicy,
    Residency,
    Source,
)
from fetcher.policy.read_router import ReadRouter
from fetcher.rows.pull import PullResult, PullStatus
from rocketmq_tiered.server.proxy.offset_merge import (
    BrokerReply,
    interpret,
    joined_min,
    lower_by_time,
    reply_code,
)
from tests.kernels.record_builder import Message, encode, properties
from tests.sweeps import examples
from tiered.catalog.state import CatalogState
from tiered.errors import UnavailableError

S = PullStatus


def body(*offsets: int) -> memoryview:
    return memoryview(b"".join(encode(Message(b"t", 0, number, b"b"), 1000 * number) for number in offsets))


def said(code: int, next_offset: int, data: memoryview | None = None, **fields: object) -> BrokerReply:
    values = {"remark": "", "min_offset": 0, "max_offset": 100} | fields
    return BrokerReply(code, next_offset=next_offset, body=body() if data is None else data, **values)  # type: ignore[arg-type]


# -- a broker's words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "has_all", "status", "next_offset", "records"),
    [
        (said(0, 12, body(10, 11)), True, S.FOUND, 12, 2),
        (said(0, 15, body(10, 14)), True, S.FOUND, 11, 1),
        (said(0, 15, body(13, 14)), True, S.OFFSET_TOO_SMALL, 13, 0),
        (said(0, 15, body(13, 14)), False, S.FOUND, 15, 2),
        (said(0, 15, body(10, 11)), True, S.FOUND, 12, 2),
        (said(0, 15, body(10, 11)), False, S.FOUND, 15, 2),
        (said(0, 11, body(8)), True, S.FOUND, 11, 1),
        (said(0, 62, body(10, 11), offset_delta=50), True, S.FOUND, 62, 2),
        (said(20, 12), False, S.NO_MATCHED_MESSAGE, 12, 0),
        (said(20, 12, remark="MESSAGE_WAS_REMOVING"), True, S.OFFSET_TOO_SMALL, 12, 0),
        (said(20, 10), True, S.NO_MATCHED_MESSAGE, 10, 0),
        (said(19, 10), True, S.OFFSET_OVERFLOW_ONE, 10, 0),
        (said(19, 10, max_offset=0), True, S.NO_MESSAGE_IN_QUEUE, 10, 0),
        (said(19, 300_000, remark="OFFSET_FOUND_NULL"), False, S.OFFSET_TOO_SMALL, 300_000, 0),
        (said(21, 40), False, S.OFFSET_TOO_SMALL, 40, 0),
        (said(21, 5), False, S.OFFSET_OVERFLOW_BADLY, 5, 0),
        (said(21, 0, max_offset=0), False, S.NO_MATCHED_LOGIC_QUEUE, 0, 0),
        (said(21, 5, remark="OFFSET_RESET"), False, S.NO_MATCHED_MESSAGE, 5, 0),
        (said(21, 50, remark="OFFSET_RESET"), True, S.NO_MATCHED_MESSAGE, 50, 0),
    ],
)
def test_what_answers_mean(
    answer: BrokerReply, has_all: bool, status: PullStatus, next_offset: int, records: int
) -> None:
    offset = 60 if answer.offset_delta else 10
    found = interpret(answer, offset, has_all=has_all)
    assert (found.status, found.next_offset) == (status, next_offset)
    expected = body(*[10, 11, 14][:records] if records == 2 and next_offset == 12 else ())
    assert b"".join(found.body) == expected or records


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 40))
def test_what_is_believed_has_no_hole(kept: set[int], offset: int) -> None:
    """A broker that lost all but ``kept`` answers what it still finds, as if nothing had been there before."""
    found = sorted(number for number in kept if number >= offset)[:8]
    answer = said(0, found[-1] + 1, body(*found)) if found else said(20, 41)
    meant: PullResult = interpret(answer, offset, has_all=True)
    if meant.status is S.FOUND:
        passed = range(offset, meant.next_offset)
        assert set(passed) <= kept and b"".join(meant.body) == body(*passed)
    else:
        assert meant.status is S.OFFSET_TOO_SMALL and offset not in kept


def batches(*spans: tuple[int, int]) -> memoryview:
    """Records of ``(base offset, messages)``: inner batches as a broker stores them, single sends between."""
    found = []
    for base, count in spans:
        inner = properties((b"INNER_BASE", b"%d" % base), (b"INNER_NUM", b"%d" % count))
        batch = Message(b"t", 0, base, b"b", inner, sys_flag=0xC0)
        found.append(encode(batch if count > 1 else Message(b"t", 0, base, b"b"), 1000 * base))
    return memoryview(b"".join(found))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
def test_what_is_believed_has_no_hole_between_batches(counts: list[int], data: st.DataObject) -> None:
    """As of single messages: the broker has lost some of a queue's records, and looked at more than it found."""
    spans, end = [], 0
    for count in counts:
        spans.append((end, count))
        end += count
    offset = data.draw(st.integers(0, end - 1))
    looked_at = [span for span in spans if span[0] + span[1] > offset][: data.draw(st.integers(1, 12))]
    kept = [span for span in looked_at if data.draw(st.booleans())]
    after = sum(looked_at[-1])
    meant = interpret(said(0 if kept else 20, after, batches(*kept)), offset, has_all=True)
    whole = 0
    while whole < len(kept) and kept[whole] == looked_at[whole]:
        whole += 1
    if whole == 0:
        assert meant.status is S.OFFSET_TOO_SMALL
    else:
        assert (meant.status, meant.next_offset) == (S.FOUND, sum(kept[whole - 1]))
        assert b"".join(meant.body) == batches(*kept[:whole])


@given(st.binary(max_size=200), st.integers(0, 9))
def test_bytes_that_are_no_records_are_no_error(data: bytes, offset: int) -> None:
    assert interpret(said(0, 9, memoryview(data)), offset, has_all=True).status in (
        S.FOUND,
        S.OFFSET_TOO_SMALL,
    )


@pytest.mark.parametrize(
    ("status", "push", "pull_api"),
    [
        (S.FOUND, 0, 0),
        (S.OFFSET_TOO_SMALL, 20, 21),
        (S.OFFSET_OVERFLOW_BADLY, None, 21),
        (S.OFFSET_OVERFLOW_ONE, None, None),
        (S.OFFSET_FOUND_NULL, None, None),
    ],
)
def test_codes(status: PullStatus, push: int | None, pull_api: int | None) -> None:
    assert reply_code(status, is_pull_api=False) == push
    assert reply_code(status, is_pull_api=True) == pull_api
    assert (
        reply_code(status, is_pull_api=True, broker_code=21, broker_status=S.NO_MATCHED_LOGIC_QUEUE)
        == pull_api
    )
    assert reply_code(status, is_pull_api=False, broker_code=19, broker_status=status) == 19, (
        "the archive changed nothing"
    )
    unproven = reply_code(status, is_pull_api=False, broker_code=0, broker_status=status)
    assert unproven == push, "messages that are not passed on are not found"


def test_offsets_by_time_in_the_joined_queue() -> None:
    archived = OffsetRange(0, 300)
    assert lower_by_time(120, archived, 250, OffsetRange(250, 400)) == 120
    assert lower_by_time(300, archived, 330, OffsetRange(250, 400)) == 330
    assert lower_by_time(300, archived, 250, OffsetRange(250, 400)) == 300
    assert lower_by_time(300, archived, 370, OffsetRange(350, 400)) == 300, "300 to 349 may be it"
    assert lower_by_time(300, archived, 0, None) == 300
    assert (joined_min(archived, 100), joined_min(archived, -1), joined_min(None, 7)) == (0, 0, 7)
    assert joined_min(OffsetRange(50, 50), 7) == 7


# -- a walk ---------------------------------------------------------------------------------------------------


@dataclass
class World:
    """What archive and broker hold of one queue. Deletions and offloading continue during the walk."""

    archived: list[int]
    broker: list[int]
    deletes: list[int]
    gap: tuple[int, int] | None = None
    archive_fails: bool = False
    cached: list[int] | None = None
    """The cached range of the broker, when it is old."""
    log: list[str] = field(default_factory=list)

    has_broker = True

    def tick(self) -> None:
        """The broker deletes a little."""
        if self.deletes:
            self.broker[0] = min(self.broker[1], self.broker[0] + self.deletes.pop())


@dataclass
class WorldSides:
    """See read_router.Sources; broker answers as DefaultMessageStore gives them."""

    world: World
    offset: int
    has_broker: bool = True

    async def local_view(self) -> LocalView:
        low, high = self.world.cached or self.world.broker
        queue = OffsetRange(low, high)
        view = LocalView(BrokerSide.READABLE, queue, self.offset in queue, -1, 0, -1, self.offset < low + 3)
        self.world.tick()
        return view

    async def residency(self) -> Residency:
        self.world.tick()
        return Residency.COLD

    async def read(self, source: Source, local: OffsetRange | None) -> PullResult:
        world, offset = self.world, self.offset
        if source is Source.TIERED:
            if world.archive_fails:
                raise UnavailableError("away")
            low, high = world.archived
            if world.gap is not None and world.gap[0] <= offset < world.gap[1]:
                return PullResult(S.NO_MATCHED_MESSAGE, world.gap[1], low, high)
            status, after = _edge(offset, low, high)
            end = min(high, offset + 4, *([world.gap[0]] if world.gap and offset < world.gap[0] else []))
            return PullResult(status, end if status is S.FOUND else after, low, high)
        world.tick()
        low, high = world.broker
        if offset < low:
            code, after = 21, low
        elif offset == high:
            code, after = 19, offset
        elif offset > high:
            code, after = 21, high
        else:
            kept = range(max(offset, low), min(high, offset + 4))
            code, after = 0, kept[-1] + 1
        found = list(range(offset, after)) if code == 0 else []
        meant = interpret(
            said(code, after, body(*found), min_offset=low, max_offset=high), offset, has_all=True
        )
        return PullResult(meant.status, meant.next_offset, low, high)


def _edge(offset: int, low: int, high: int) -> tuple[PullStatus, int]:
    if high <= 0:
        return S.NO_MESSAGE_IN_QUEUE, offset
    if offset < low:
        return S.OFFSET_TOO_SMALL, low
    if offset >= high:
        return (S.OFFSET_OVERFLOW_ONE if offset == high else S.OFFSET_OVERFLOW_BADLY), high
    return S.FOUND, high


class NoCatalog:
    """Bounds come from the world."""

    state: CatalogState

    def refresh_if_due(self) -> None:
        """Nothing."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A queue of at most 40 messages, archived from the start or from later on, the broker ahead or cut back."""
    high = draw(st.integers(1, 40))
    archived_low = draw(st.sampled_from([0, 0, 0, min(2, high)]))
    archived = [archived_low, draw(st.integers(archived_low, high))]
    low = draw(st.integers(0, high))
    gap = None
    if archived[1] - archived[0] > 6 and draw(st.booleans()):
        begin = draw(st.integers(archived[0] + 1, archived[1] - 3))
        gap = begin, draw(st.integers(begin + 1, archived[1] - 1))
    cached = [draw(st.integers(0, low)), high] if draw(st.booleans()) else None
    return World(archived, [low, high], draw(st.lists(st.integers(0, 6), max_size=6)), gap, cached=cached)


@settings(max_examples=examples(400), deadline=None)
@given(
    worlds(),
    st.sampled_from([ReadPolicy.NOT_IN_DISK, ReadPolicy.NOT_IN_MEM, ReadPolicy.FORCE]),
    st.booleans(),
)
def test_no_walk_passes_an_existing_message(world: World, policy: ReadPolicy, is_pull_api: bool) -> None:
    async def walk() -> None:
        router = ReadRouter(NoCatalog(), ReadPolicies(policy))
        offset, at_rest = 0, 0
        for _ in range(120):
            sides = WorldSides(world, offset)
            outcome = await router.pull(sides, await router.plan(sides, "t", 0, offset))
            next_offset, status = outcome.joined.next_offset, outcome.joined.status
            meant = outcome.result.status if outcome.result is not None else None
            code = reply_code(status, is_pull_api=is_pull_api, broker_code=None, broker_status=meant)
            if outcome.result is None or code is None:
                assert next_offset == offset or code is None
                at_rest += 1
                world.cached = None  # a second has gone by
                if at_rest > 8:
                    break
                continue
            assert offset < next_offset <= max(world.archived[1], world.broker[1])
            for number in range(offset, next_offset):
                is_archived = world.archived[0] <= number < world.archived[1]
                in_gap = world.gap is not None and world.gap[0] <= number < world.gap[1]
                below_all = number < min(world.archived[0], world.broker[0])
                assert status is S.FOUND or in_gap or below_all or not is_archived, (number, status)
                is_at_broker = world.broker[0] <= number < world.broker[1]
                assert status is S.FOUND or in_gap or not is_at_broker, f"{number} was skipped"
                lost = not is_archived and number < world.broker[0]
                assert status is S.FOUND or in_gap or not lost or below_all, f"{number} was not held"
            offset = next_offset
        end = max(world.archived[1], world.broker[1])
        if world.broker[0] <= world.archived[1]:
            assert offset == end, "the whole queue was walked"

    def archived_queue(*_: object) -> object:
        low, high = world.archived
        return ArchivedQueue(OffsetRange(low, high), 1 << 40, 1 << 40)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fetcher.policy.archived_queues.archived_queue", archived_queue)
        patch.setattr(NoCatalog, "state", None, raising=False)
        asyncio.run(walk())

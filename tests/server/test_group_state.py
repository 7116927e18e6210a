"""Group offsets: what was acknowledged is there after any restart, and only one server writes."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_tiered.server.groups import group_offsets
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import (
    VERSIONS_KEPT,
    GroupLog,
    GroupSnapshot,
    decode_snapshot,
    encode_snapshot,
    load_snapshot,
)
from tests.server.group_clock import LEASE_MS, Time, writing
from tests.sweeps import examples
from tiered.clock import Clock
from tiered.errors import CorruptionError, FencedError, UnansweredError, UnsupportedFormatError
from tiered.formats.keys import SERVE_PREFIX
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore


class LosesAnswers(MemoryStore):
    """Every ``every``-th put has its effect and no answer."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self._puts = every, 0

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        super().put_if_absent(key, body, timeout_s=timeout_s)
        self._puts += 1
        if self._puts % self.every == 0:
            raise UnansweredError(f"{key}: no answer")


OFFSETS = st.dictionaries(
    st.tuples(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8)),
    st.dictionaries(st.integers(0, 2**31 - 1), st.integers(0, 2**62), min_size=1, max_size=4),
    max_size=5,
)


@given(OFFSETS, st.integers(0, 2**40), st.booleans())
def test_snapshots_come_back(
    offsets: dict[tuple[str, str], dict[int, int]], now_ms: int, released: bool
) -> None:
    snapshot = GroupSnapshot(7, "me", "host:1", now_ms, released, offsets)
    assert decode_snapshot(encode_snapshot(snapshot), source="s") == snapshot


@settings(max_examples=examples(50))
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_is_noticed(at: int, bit: int) -> None:
    data = bytearray(encode_snapshot(GroupSnapshot(1, "me", "h", 5, False, {("g", "t"): {0: 5}})))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises((CorruptionError, UnsupportedFormatError)):
        decode_snapshot(bytes(data), source="s")


def test_a_restart_finds_everything_and_old_versions_go() -> None:
    store, clock = MemoryStore(), Time()
    log = GroupLog(store, "one", Clock(wall_ms=clock))
    log.claim(LEASE_MS)
    for offset in range(20):
        log.write({("g", "t"): {0: offset}})
    log.write({("g", "t"): {0: 20}}, released=True)
    assert load_snapshot(store).offsets == {("g", "t"): {0: 20}}
    assert len(list(store.list(SERVE_PREFIX))) == VERSIONS_KEPT
    for number in range(5):
        again = GroupLog(store, f"{number}", Clock(wall_ms=clock))
        again.claim(LEASE_MS)
        assert again.offsets == {("g", "t"): {0: 20}}
        for _ in range(number * VERSIONS_KEPT // 2):
            again.write(again.offsets)
        again.write(again.offsets, released=True)
    # The former owner of the groups does not wake up.
    assert len(list(store.list(SERVE_PREFIX))) == VERSIONS_KEPT


def test_starts_after_kills_leave_nothing_where_the_killed_one_is_known_to_be_gone() -> None:
    store, clock, gone = MemoryStore(), Time(), set[str]()
    for number in range(30):
        log = GroupLog(store, f"{number}", Clock(wall_ms=clock), is_gone=gone.__contains__)
        log.claim(LEASE_MS)
        for _ in range(number % 3):
            log.write({("g", "t"): {0: number}})
        gone.add(f"{number}")
    assert len(list(store.list(SERVE_PREFIX))) <= VERSIONS_KEPT + 2


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_slow_claim_does_not_own_what_another_server_claimed_first(
    is_first: bool, is_refused: bool
) -> None:
    """His version was there, and is removed: before the claim, or after it ``is_refused``."""
    clock, successors = Time(), list[GroupLog]()

    class Stalls(MemoryStore):
        def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
            others, successors[:] = successors[:], []
            for other in others:
                other.claim(LEASE_MS)
            writes = [(other, at) for other in others for at in range(3 * VERSIONS_KEPT)]
            try:
                if not others or is_refused:
                    super().put_if_absent(key, body, timeout_s=timeout_s)
            finally:
                for other, at in writes:
                    other.write({("g", "t"): {0: at}})
            if others and not is_refused:
                super().put_if_absent(key, body, timeout_s=timeout_s)

    store = Stalls()
    if not is_first:
        before = GroupLog(store, "before", Clock(wall_ms=clock))
        before.claim(LEASE_MS)
        before.write({}, released=True)
    successors.append(GroupLog(store, "other", Clock(wall_ms=clock)))
    with pytest.raises(FencedError):
        GroupLog(store, "long about it", Clock(wall_ms=clock)).claim(LEASE_MS)
    found = load_snapshot(store)
    assert (found.owner_name, found.offsets) == ("other", {("g", "t"): {0: 3 * VERSIONS_KEPT - 1}})
    assert len(list(store.list(SERVE_PREFIX))) <= VERSIONS_KEPT + 1


def test_an_owner_taken_over_after_a_lost_reply_is_fenced() -> None:
    """It writes the version again that its successor found as the newest."""
    store, clock = LosesAnswers(every=1 << 40), Time()
    sleeper = GroupLog(store, "sleeper", Clock(wall_ms=clock))
    sleeper.claim(LEASE_MS)
    for offset in range(VERSIONS_KEPT):
        sleeper.write({("g", "t"): {0: offset}})
    store.every = 1
    with pytest.raises(UnansweredError):
        sleeper.write({("g", "t"): {0: 100}})
    store.every = 1 << 40
    successor = GroupLog(store, "successor", Clock(wall_ms=clock))
    successor.claim(LEASE_MS, take_over=True)
    for offset in range(101, 101 + 2 * VERSIONS_KEPT):
        successor.write({("g", "t"): {0: offset}})
    with pytest.raises(FencedError):
        sleeper.write({("g", "t"): {0: 100}})


def test_a_claim_that_another_overtook_still_fences_the_owner_before() -> None:
    clock, successors = Time(), list[GroupLog]()

    class Stalls(MemoryStore):
        def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
            super().put_if_absent(key, body, timeout_s=timeout_s)
            if successors:
                successors.pop().claim(LEASE_MS, take_over=True)

    store = Stalls()
    sleeper = GroupLog(store, "sleeper", Clock(wall_ms=clock))
    sleeper.claim(LEASE_MS)
    successors.append(GroupLog(store, "other", Clock(wall_ms=clock)))
    with pytest.raises(FencedError):
        GroupLog(store, "overtaken", Clock(wall_ms=clock)).claim(LEASE_MS, take_over=True)
    with pytest.raises(FencedError):
        sleeper.write({("g", "t"): {0: 1}})


def test_a_claim_whose_answer_was_lost_is_our_own() -> None:
    store = LosesAnswers(every=1)
    log = GroupLog(store, "one", Clock(wall_ms=Time()))
    with pytest.raises(UnansweredError):
        log.claim(LEASE_MS)
    store.every = 1 << 40
    log.claim(LEASE_MS)  # it is ours: no other server could serve these groups for a minute
    log.write({("g", "t"): {0: 7}})
    assert load_snapshot(store).offsets == {("g", "t"): {0: 7}}


async def test_the_end_waits_for_what_is_being_written() -> None:
    """Else the one that is late wins: with older offsets, and without giving the groups up."""

    store, offsets, running = await writing()
    offsets.note("g", "t", 0, 6)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    store.is_overtaken = True
    closing = asyncio.create_task(offsets.close())
    await asyncio.sleep(0.2)
    store.may_continue.set()
    await closing
    await asyncio.sleep(0.3)
    found = load_snapshot(store)
    assert (found.offsets["g", "t"][0], found.released) == (6, True)


def test_a_second_server_waits_for_the_lease_and_then_fences_the_first() -> None:
    store, clock = MemoryStore(), Time()
    first, second = GroupLog(store, "one", Clock(wall_ms=clock)), GroupLog(store, "two", Clock(wall_ms=clock))
    first.claim(LEASE_MS)
    first.write({("g", "t"): {0: 1}})
    with pytest.raises(FencedError, match="served by one"):
        second.claim(LEASE_MS)
    clock.now_ms += LEASE_MS
    second.claim(LEASE_MS)
    with pytest.raises(FencedError, match="two"):
        first.write({("g", "t"): {0: 99}})
    assert load_snapshot(store).offsets == {("g", "t"): {0: 1}}


def test_an_owner_whose_clock_was_ahead_is_gone_when_nothing_was_heard_of_it_for_a_lease() -> None:
    store, clock, ahead = MemoryStore(), Time(), Time()
    ahead.now_ms += 60 * LEASE_MS
    owner, waiting = (
        GroupLog(store, "ahead", Clock(wall_ms=ahead)),
        GroupLog(store, "waiting", Clock(wall_ms=clock)),
    )
    owner.claim(LEASE_MS)
    for renewals in range(3):  # as long as it is there
        owner.write({("g", "t"): {0: renewals}})
        with pytest.raises(FencedError, match="served by ahead, which wrote their offsets 0 s ago"):
            waiting.claim(LEASE_MS)
        clock.now_ms += LEASE_MS - 1
        with pytest.raises(FencedError, match="served by ahead"):
            waiting.claim(LEASE_MS)
    clock.now_ms += 1
    waiting.claim(LEASE_MS)
    assert load_snapshot(store).offsets == {("g", "t"): {0: 2}}


@pytest.mark.parametrize("foreign", [".DS_Store", "0-notes", "notes"])
def test_an_object_that_is_no_version_hides_no_offsets_and_fences_no_server(foreign: str) -> None:
    """Browsers of buckets, and file systems over them, leave one that is called like the folder."""
    store, clock = MemoryStore(), Time()
    store.put_if_absent(SERVE_PREFIX + foreign, [])
    assert load_snapshot(store) == GroupSnapshot()
    for number in range(1, 4):
        log = GroupLog(store, f"{number}", Clock(wall_ms=clock))
        log.claim(LEASE_MS)
        log.write({("g", "t"): {0: number}}, released=True)
        assert load_snapshot(store).offsets == {("g", "t"): {0: number}}
    assert SERVE_PREFIX + foreign in [info.key for info in store.list(SERVE_PREFIX)], "it is not ours"


@pytest.mark.parametrize(("versions", "successors"), [(1, 1), (VERSIONS_KEPT, 1), (5 * VERSIONS_KEPT, 3)])
def test_a_fenced_server_learns_it_however_far_its_successors_are(versions: int, successors: int) -> None:
    store, clock = MemoryStore(), Time()
    first = GroupLog(store, "one", Clock(wall_ms=clock))
    first.claim(LEASE_MS)
    for number in range(successors):
        successor = GroupLog(store, f"successor {number}", Clock(wall_ms=clock))
        successor.claim(LEASE_MS, take_over=True)
        for offset in range(versions):
            successor.write({("g", "t"): {0: offset}})
    with pytest.raises(FencedError, match="successor 0"):
        first.write({("g", "t"): {0: 99}})
    assert load_snapshot(store).offsets == {("g", "t"): {0: versions - 1}}


async def test_a_new_generation_is_begun_at_its_first_message_and_not_where_the_old_one_was_left() -> None:
    lives = {("t", 0): 0, ("%RETRY%g", 0): 0}

    async def server(store: MemoryStore) -> GroupOffsets:
        log = GroupLog(store, "one", Clock(wall_ms=Time()), generation_of=lambda *queue: lives.get(queue, 0))
        offsets = GroupOffsets(log, lease_ms=LEASE_MS, take_over=True)
        assert await offsets.claim()
        return offsets

    store = MemoryStore()
    offsets = await server(store)
    offsets.note("g", "t", 0, 1000)
    offsets.note("g", "%RETRY%g", 0, 7)
    lives["t", 0] = lives["%RETRY%g", 0] = 1
    assert offsets.find("g", "t", 0) == 0
    assert offsets.find("g", "t", 1) is None and offsets.find("new", "t", 0) is None
    assert offsets.find("g", "%RETRY%g", 0) == 7, "it continues here"
    await offsets.close()
    offsets = await server(store)
    assert offsets.find("g", "t", 0) == 0
    running = asyncio.create_task(offsets.run())
    await offsets.commit("g", "t", 0, 0)
    await offsets.commit("g", "t", 0, 5)
    running.cancel()
    offsets = await server(store)
    assert (offsets.find("g", "t", 0), offsets.durable("g", "t", 0)) == (5, 5)
    assert offsets.topics_of("g") == ["%RETRY%g", "t"]


def test_a_lost_answer_loses_no_offset() -> None:
    store = LosesAnswers(every=2)
    log = GroupLog(store, "one", Clock(wall_ms=Time()))
    log.claim(LEASE_MS)
    for offset in range(1, 30):
        for _ in range(3):
            try:
                log.write({("g", "t"): {0: offset}})
                break
            except UnansweredError:
                continue
        assert load_snapshot(store).offsets == {("g", "t"): {0: offset}}


async def test_a_commit_is_acknowledged_only_when_it_is_durable() -> None:
    store = MemoryStore()
    offsets = GroupOffsets(GroupLog(store, "one", Clock(wall_ms=Time())), lease_ms=LEASE_MS)
    assert await offsets.claim()
    running = asyncio.create_task(offsets.run())
    await asyncio.gather(*(offsets.commit("g", "t", queue, 10 + queue) for queue in range(8)))
    assert load_snapshot(store).offsets == {("g", "t"): {queue: 10 + queue for queue in range(8)}}
    offsets.note("g", "t", 0, 50)
    running.cancel()
    await offsets.close()
    found = load_snapshot(store)
    assert (found.offsets["g", "t"][0], found.released) == (50, True)


async def test_the_end_does_not_wait_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(MemoryStore):
        is_away = False

        def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
            if self.is_away:
                raise UnansweredError("away")
            super().put_if_absent(key, body, timeout_s=timeout_s)

    monkeypatch.setattr(group_offsets, "CLOSE_S", 0.3)
    store = Away()
    offsets = GroupOffsets(GroupLog(store, "one", Clock(wall_ms=Time())), lease_ms=LEASE_MS)
    assert await offsets.claim()
    store.is_away = True
    async with asyncio.timeout(2):
        await offsets.close()


async def test_an_offset_that_is_being_written_is_not_acknowledged_yet() -> None:
    """Also for who commits it again, or came with it in a pull before."""

    store, offsets, running = await writing()
    again = asyncio.create_task(offsets.commit("g", "t", 0, 5))
    done, _ = await asyncio.wait({again}, timeout=0.1)
    assert not done, "acknowledged, and lost if this server ends now"
    store.may_continue.set()
    await again
    assert load_snapshot(store).offsets == {("g", "t"): {0: 5}}
    async with asyncio.timeout(0.1):  # known to be there: nothing is written
        await offsets.commit("g", "t", 0, 5)
    running.cancel()


async def test_once_fenced_commits_are_refused_and_none_hangs() -> None:
    store, clock = MemoryStore(), Time()
    offsets = GroupOffsets(GroupLog(store, "one", Clock(wall_ms=clock)), lease_ms=LEASE_MS)
    assert await offsets.claim()
    running = asyncio.create_task(offsets.run())
    GroupLog(store, "two", Clock(wall_ms=clock)).claim(LEASE_MS, take_over=True)
    with pytest.raises(FencedError):
        await offsets.commit("g", "t", 0, 5)
    with pytest.raises(FencedError):
        await offsets.commit("g", "t", 0, 6)
    running.cancel()


async def test_a_server_that_waits_shows_the_offsets_and_owns_them_when_the_other_is_gone() -> None:
    store, clock, gone = MemoryStore(), Time(), set[str]()
    first = GroupLog(store, "one", Clock(wall_ms=clock))
    first.claim(LEASE_MS)
    first.write({("g", "t"): {0: 7}})
    waiting = GroupOffsets(
        GroupLog(store, "two", Clock(wall_ms=clock), is_gone=gone.__contains__), lease_ms=30
    )
    clock.now_ms += 10
    assert not await waiting.claim()
    assert waiting.find("g", "t", 0) == 7
    waiting.note("g", "t", 0, 1)
    assert waiting.find("g", "t", 0) == 7
    gone.add("one")
    running = asyncio.create_task(waiting.run())
    await asyncio.sleep(0.5)
    await waiting.commit("g", "t", 0, 9)
    assert load_snapshot(store).offsets == {("g", "t"): {0: 9}}
    running.cancel()

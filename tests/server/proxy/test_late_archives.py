"""An archive that begins later than the broker's files, or holds an earlier generation: no message is passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fetcher.policy.read_policy import HeldOffsets
from fetcher.policy.read_router import ArchivedQueue
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.backend.backend import Bounds
from tests.server.proxy.proxy_pulls import ARCHIVED, STORED, SUBSCRIPTION, SUSPEND, Scene, run
from tests.server.proxy.scripted_broker import stored_ms_of
from tiered.errors import UnavailableError
from tiered.remoting.codes import RequestCode as R

BEGINS = 100


def begin_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive has [BEGINS, ARCHIVED) only."""
    whole, bounds = scene.archive.pull, Bounds(BEGINS, ARCHIVED)

    async def pull(wish: PullRequest) -> PullResult:
        if wish.offset < BEGINS:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, BEGINS, *bounds)
        found = await whole(wish)
        return PullResult(found.status, found.next_offset, *bounds, found.body, found.records)

    async def offset_by_time(topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        return max(BEGINS, await by_time(topic, queue_id, store_ms, upper=upper))

    by_time = scene.archive.offset_by_time
    queue = ArchivedQueue(HeldOffsets(BEGINS, ARCHIVED), 1 << 40, 1 << 40)
    monkeypatch.setattr(scene.archive, "pull", pull)
    monkeypatch.setattr(scene.archive, "offset_by_time", offset_by_time)
    monkeypatch.setattr("fetcher.policy.read_router.archived_queue", lambda *_: queue)


@pytest.mark.parametrize(("policy", "flags"), [("NOT_IN_DISK", SUSPEND), ("FORCE", SUSPEND | SUBSCRIPTION)])
def test_while_the_broker_is_away_no_consumer_is_moved_past_what_only_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, flags: int
) -> None:
    async def story(scene: Scene) -> None:
        begin_late(scene, monkeypatch)
        scene.policy(policy)
        assert scene.numbers(await scene.pull(7, flags=flags))[0] == 7
        await scene.broker.kill()
        scene.forget()
        held = await scene.pull(7, flags=flags)
        assert (held.code, held.ext["nextBeginOffset"]) == (20, "7")
        assert scene.numbers(await scene.pull(BEGINS, flags=flags))[0] == BEGINS

    run(tmp_path, story, with_files=False)


@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "FORCE"])
def test_a_broker_without_known_bounds_gets_pulls_below_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    async def story(scene: Scene) -> None:
        begin_late(scene, monkeypatch)
        scene.policy(policy)
        scene.broker.refuses = {R.GET_MIN_OFFSET: (16, "no"), R.GET_MAX_OFFSET: (16, "no")}
        response = await scene.pull(7)
        assert scene.numbers(response) == list(range(7, 39))
        minimum = scene.expire(150)
        scene.forget()
        assert minimum > BEGINS
        gone = await scene.pull(7)
        assert (gone.code, int(gone.ext["nextBeginOffset"])) in ((20, BEGINS), (21, BEGINS))
        assert scene.numbers(await scene.pull(BEGINS))[0] == BEGINS

    run(tmp_path, story, with_files=False)


def test_a_time_before_the_archive_is_not_its_begin_while_the_broker_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(scene: Scene) -> None:
        begin_late(scene, monkeypatch)
        await scene.broker.kill()
        with pytest.raises(UnavailableError):
            await scene.ask(R.SEARCH_OFFSET_BY_TIMESTAMP, topic="t", queueId=0, timestamp=0)
        later_ms = stored_ms_of(scene.store.records["t", 0][BEGINS + 60])
        response = await scene.ask(R.SEARCH_OFFSET_BY_TIMESTAMP, topic="t", queueId=0, timestamp=later_ms)
        assert BEGINS < int(response.ext["offset"]) <= BEGINS + 60

    run(tmp_path, story, with_files=False)


def test_who_may_not_search_learns_nothing_from_the_archive(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        scene.broker.refuses = dict.fromkeys(
            (R.SEARCH_OFFSET_BY_TIMESTAMP, R.GET_EARLIEST_MSG_STORETIME), (16, "no")
        )
        response = await scene.ask(R.SEARCH_OFFSET_BY_TIMESTAMP, topic="t", queueId=0, timestamp=0)
        assert response.code == 16

    run(tmp_path, story)


@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "NOT_IN_MEM", "FORCE"])
def test_an_earlier_generation_of_the_queue_is_not_served_as_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    async def story(scene: Scene) -> None:
        scene.policy(policy)
        # All that the broker has of the queue lies behind what is archived of it.
        earlier = ArchivedQueue(HeldOffsets(0, ARCHIVED), 0, 1 << 40)
        monkeypatch.setattr("fetcher.policy.read_router.archived_queue", lambda *_: earlier)
        response = await scene.pull(7)
        assert scene.broker.codes().count(R.PULL_MESSAGE) == 1, "the broker answers"
        assert response.ext["maxOffset"] == str(STORED)

    run(tmp_path, story)


@pytest.mark.parametrize("policy", ["DISABLE", "NOT_IN_DISK", "FORCE"])
def test_an_offset_below_zero_leads_to_the_begin_of_the_queue(tmp_path: Path, policy: str) -> None:
    async def story(scene: Scene) -> None:
        minimum = scene.expire(150)
        scene.policy(policy)
        response = await scene.pull(-1)
        begin = minimum if policy == "DISABLE" else 0
        assert (response.code, response.ext["nextBeginOffset"]) == (21, str(begin))
        assert (response.ext["minOffset"], response.ext["maxOffset"]) == (str(begin), str(STORED))
        assert response.ext["suggestWhichBrokerId"] == "0"

    run(tmp_path, story)

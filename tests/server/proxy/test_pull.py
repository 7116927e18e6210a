"""Pulls beside a live broker: every policy, wherever the message is, and everything that may happen in between."""

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest

from rocketmq_tiered.server.groups.client_table import SQL92, Subscription
from tests.fetcher.broker_store_writer import WrittenStore
from tests.server.proxy.proxy_pulls import (
    ARCHIVED,
    COMMIT_OFFSET,
    STORED,
    SUBSCRIPTION,
    SUSPEND,
    Scene,
    beside_a_broker,
)
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand, RequestCode

POLICIES = ["DISABLE", "NOT_IN_DISK", "NOT_IN_MEM", "FORCE"]
WAYS = pytest.mark.parametrize("with_files", [True, False], ids=["files", "word"])
ARCHIVE, BROKER = "archive", "broker"


async def who(scene: Scene, offset: int, **options: object) -> tuple[str, int, int, list[int]]:
    """(who answered, code, next offset, offsets found)."""
    before = sum(code in (11, 361) for code in scene.broker.codes())
    response = await scene.pull(offset, **options)  # type: ignore[arg-type]
    asked = sum(code in (11, 361) for code in scene.broker.codes()) > before
    assert response.ext["suggestWhichBrokerId"] == "0"
    numbers = scene.numbers(response)
    return BROKER if asked else ARCHIVE, response.code, int(response.ext["nextBeginOffset"]), numbers


@WAYS
@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_everywhere(scene: Scene, policy: str) -> None:
    minimum = scene.expire(100)
    scene.policy(policy)
    disabled, forced = policy == "DISABLE", policy == "FORCE"
    for offset, by_rule in (
        (0, ARCHIVE),
        (minimum - 1, ARCHIVE),
        (minimum + 150, BROKER),
        (ARCHIVED - 1, BROKER),
    ):
        by = BROKER if disabled else ARCHIVE if forced else by_rule
        if disabled and offset < minimum:
            assert await who(scene, offset) == (BROKER, 21, minimum, [])
            continue
        answered, code, after, numbers = await who(scene, offset)
        assert (answered, code) == (by, 0), offset
        assert numbers == list(range(offset, after)) and after > offset
    assert (await who(scene, ARCHIVED))[:3] == (BROKER, 0, ARCHIVED + 32)
    assert await who(scene, STORED) == (BROKER, 19, STORED, [])
    assert await who(scene, STORED + 7) == (BROKER, 21, STORED, [])


@WAYS
@pytest.mark.parametrize(
    ("policy", "code"),
    [("NOT_IN_DISK", RequestCode.PULL_MESSAGE), ("FORCE", RequestCode.LITE_PULL_MESSAGE)],
)
async def test_a_consumer_crosses_from_archive_to_broker_without_gap_or_repeat(
    scene: Scene, policy: str, code: int
) -> None:
    scene.expire(150)
    scene.policy(policy)
    offset, seen = 0, []
    while offset < STORED:
        response = await scene.pull(offset, count=17, code=code)
        assert (response.code, response.ext["minOffset"]) == (0, "0")
        seen += scene.numbers(response)
        offset = int(response.ext["nextBeginOffset"])
        if len(seen) % 5 == 0:
            scene.forget()
    assert seen == list(range(STORED))


# -- retried at the same offset, moved -----------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize(("policy", "flags"), [("NOT_IN_DISK", SUSPEND), ("FORCE", SUSPEND | SUBSCRIPTION)])
async def test_between_the_archives_end_and_the_brokers_minimum_offsets_are_held(
    scene: Scene, policy: str, flags: int
) -> None:
    minimum = scene.expire(370)
    assert minimum > ARCHIVED
    scene.policy(policy)
    for offset in (ARCHIVED, minimum - 1):
        assert (await who(scene, offset, flags=flags))[1:] == (20, offset, [])
    assert (await who(scene, ARCHIVED - 1))[1:3] == (0, ARCHIVED)
    assert (await who(scene, minimum))[1:3] == (0, minimum + 32)
    assert scene.router.counters.retried >= 2


async def test_a_held_pull_is_answered_as_soon_as_the_archive_has_it(scene: Scene, tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    shutil.copytree(scene.store.path, spare)
    scene.expire(370)
    scene.forget()
    held = asyncio.create_task(scene.pull(ARCHIVED, hold_ms=1500))
    await asyncio.sleep(0.05)
    assert not held.done()
    await scene.commit_archive(spare)
    response = await held
    assert response.code == 0 and scene.numbers(response)[0] == ARCHIVED
    assert 11 not in scene.broker.codes()


async def test_only_a_recorded_gap_moves_a_consumer_on(scene: Scene) -> None:
    minimum = scene.expire(370)
    await scene.commit_archive(scene.store.path)
    offset, seen = 0, []
    while offset < STORED:
        response = await scene.pull(offset)
        assert response.code in (0, 20)
        seen += scene.numbers(response)
        assert int(response.ext["nextBeginOffset"]) > offset
        offset = int(response.ext["nextBeginOffset"])
    assert seen == [*range(ARCHIVED), *range(minimum, STORED)]


async def test_a_queue_on_its_way_into_the_archive_is_held_and_one_never_archived_is_the_brokers(
    tmp_path: Path,
) -> None:
    async with beside_a_broker(tmp_path, with_files=False) as scene:
        for number in range(200):
            scene.store.put("late", 0, b"%d" % number + b"y" * 900)
        scene.expire(399)
        first = min(int(path.name) for path in (scene.store.path / "commitlog").iterdir())
        late = scene.store.records["late", 0]
        minimum = min(n for n, r in late.items() if int.from_bytes(r[28:36], "big") >= first)
        scene.broker.minimum["late", 0] = minimum = max(minimum, 5)
        scene.forget()
        response = await scene.pull(3, topic="late")
        assert (response.code, response.ext["nextBeginOffset"]) == (20, "3")
        scene.router._topics = type(scene.router._topics)(exclude=("late",))
        response = await scene.pull(3, topic="late")
        assert (response.code, response.ext["nextBeginOffset"]) == (21, str(minimum)), "gone is gone"


async def test_an_operators_reset_reaches_the_client(scene: Scene) -> None:
    scene.broker.refuses[11] = (21, "OFFSET_RESET")
    ext = {"nextBeginOffset": "7", "minOffset": "0", "maxOffset": "400"}

    async def answer(command: RemotingCommand) -> RemotingCommand:
        return RemotingCommand(21, 0, remark="OFFSET_RESET", ext_fields=ext)

    scene.broker.answer = answer  # type: ignore[method-assign]
    assert (await who(scene, 350))[1:] == (21, 7, [])


# -- races ----------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize(("quietly", "offset"), [(False, 90), (True, 250)], ids=["known", "removing"])
async def test_the_broker_deletes_between_decision_and_relay(
    scene: Scene, quietly: bool, offset: int
) -> None:
    """Decided while the broker had it; when asked, it has only later messages and says so, or gives those."""

    await scene.pull(offset)  # what is known of the queue is cached
    scene.views.keep_s = 1e9
    scene.broker.before = lambda command: command.code == 11 and scene.expire(290, quietly=quietly)
    assert (await who(scene, offset))[1:3] == (0, offset + 32)
    scene.broker.before = lambda command: command.code == 11 and scene.expire(399, quietly=quietly)
    assert (await who(scene, 350))[1:] == (20, 350, []), "not archived: held"


@WAYS
@pytest.mark.parametrize(("quietly", "tag"), [(False, "a"), (True, "")], ids=["filtered", "all"])
async def test_what_the_broker_deletes_of_a_queue_on_its_way_into_the_archive_is_held(
    tmp_path: Path, with_files: bool, quietly: bool, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided while the broker had it and the archive was not behind; and again before the next look."""
    monkeypatch.setattr("rocketmq_tiered.server.proxy.proxy_pull.LOOK_AGAIN_S", 0.1)

    async with beside_a_broker(tmp_path, with_files=with_files) as scene:
        for number in range(200):
            scene.store.put("late", 0, b"%d" % number + b"y" * 900, tags="a")
        if tag:
            scene.subscriptions.known, scene.broker.tag = Subscription("late", tag), tag
        assert scene.numbers(await scene.pull(3, topic="late", count=1), "late") == [3]

        def deletes(command: RemotingCommand) -> None:
            if command.code == 11:
                scene.expire(100, quietly=quietly, topic="late")

        scene.broker.before = deletes
        for _ in range(3):
            response = await scene.pull(3, topic="late", flags=0)
            assert (response.code, response.ext["nextBeginOffset"]) == (20, "3")


@WAYS
@pytest.mark.parametrize("quietly", [False, True], ids=["known", "removing"])
async def test_filtered_messages_deleted_between_decision_and_relay_are_not_skipped(
    tmp_path: Path, with_files: bool, quietly: bool
) -> None:
    async with beside_a_broker(tmp_path, with_files=with_files, tags=True) as scene:
        scene.subscriptions.known = Subscription("t", "a")
        scene.broker.tag = "a"
        answered, code, _, numbers = await who(scene, 250, count=8)
        assert (answered, code, numbers) == (BROKER, 0, list(range(250, 266, 2)))
        scene.views.keep_s = 1e9
        scene.broker.before = lambda command: command.code == 11 and scene.expire(290, quietly=quietly)
        _, code, _, numbers = await who(scene, 250, count=8)
        assert (code, numbers) == (0, list(range(250, 266, 2)))
        assert scene.router.counters.fallbacks == {"local OFFSET_TOO_SMALL": 1}


@WAYS
@pytest.mark.parametrize(("flags", "end"), [(SUSPEND, 250), (SUSPEND | SUBSCRIPTION, 260)])
async def test_a_broker_that_comes_back_with_a_shorter_log_moves_no_consumer_past_the_archive(
    scene: Scene, tmp_path: Path, flags: int, end: int
) -> None:
    """After a power failure, say: what was known of its queues is not true any more."""

    assert (await who(scene, 240))[:2] == (BROKER, 0)
    kept = {number: record for number, record in scene.store.records["t", 0].items() if number < end}
    scene.broker.store = WrittenStore(tmp_path / "cut")
    scene.broker.store.records["t", 0] = kept
    assert (await who(scene, 260, flags=flags))[1:] == (0, 292, list(range(260, 292)))


# -- a side is away -------------------------------------------------------------------------------------------


@WAYS
async def test_the_archive_is_still_served_without_the_broker(scene: Scene) -> None:
    scene.expire(150)
    await scene.pull(200)
    await scene.broker.kill()
    scene.forget()
    offset, seen = 0, []
    while (response := await scene.pull(offset)).code == 0:
        seen += scene.numbers(response)
        offset = int(response.ext["nextBeginOffset"])
    assert seen == list(range(ARCHIVED))
    assert (response.code, response.ext["nextBeginOffset"]) == (20, str(ARCHIVED))
    await scene.broker.start(int(scene.broker.address.rpartition(":")[2]))
    await asyncio.sleep(0.6)  # refused a moment ago
    scene.forget()
    assert (await who(scene, ARCHIVED))[1:3] == (0, ARCHIVED + 32)


async def test_a_broker_that_dies_mid_long_poll_moves_no_consumer(scene: Scene) -> None:
    held = asyncio.create_task(scene.pull(STORED, hold_ms=1200))
    await asyncio.sleep(0.1)
    await scene.broker.kill()
    response = await held
    assert (response.code, response.ext["nextBeginOffset"]) == (20, str(STORED))


@pytest.mark.parametrize("policy", ["NOT_IN_DISK", "FORCE"])
async def test_with_the_object_store_away_nothing_is_skipped(scene: Scene, policy: str) -> None:
    scene.expire(150)
    scene.policy(policy)
    scene.break_archive(UnavailableError("away"))
    for _ in range(3):
        with contextlib.suppress(UnavailableError):
            response = await scene.pull(10)  # where the broker's minimum is not known yet, it is held
            assert (response.code, response.ext["nextBeginOffset"]) == (20, "10")
    assert (await who(scene, 250))[1:3] == (0, 282), "the broker has it"
    assert (await who(scene, 350))[1:3] == (0, 382)


async def test_a_busy_broker_is_stood_in_for_and_one_that_forbids_is_not(scene: Scene) -> None:
    scene.broker.refuses[11] = (2, "[PC_SYNCHRONIZED]broker busy")
    assert (await who(scene, 250))[1] == 0
    for code, remark in ((16, "no permission"), (1, "AclException: wrong"), (24, "no subscription")):
        scene.broker.refuses[11] = (code, remark)
        response = await scene.pull(250)
        assert (response.code, response.remark, list(response.body)) == (code, remark, [])


# -- commits and filters --------------------------------------------------------------------------------------


async def test_commits_reach_the_broker_once_whichever_side_answers(scene: Scene) -> None:
    scene.expire(150)
    flags = SUSPEND | COMMIT_OFFSET
    await scene.pull(10, flags=flags, commitOffset=10, AccessKey="k", Signature="s")
    await asyncio.sleep(0.05)
    assert scene.broker.commits == [10]
    command = next(command for command in scene.broker.requests if command.code == 15)
    assert command.is_oneway and command.ext_fields["Signature"] == "s"
    await scene.pull(350, flags=flags, commitOffset=350)
    assert scene.broker.commits == [10, 350] and scene.broker.codes().count(15) == 1
    await scene.pull(-0, flags=flags, commitOffset=-1)
    assert scene.broker.commits == [10, 350], "-1 is none"


@pytest.mark.parametrize("signed", [False, True])
async def test_a_commit_is_not_sent_again_by_a_relay_that_comes_later(scene: Scene, signed: bool) -> None:
    scene.policy("FORCE")
    scene.break_archive(UnavailableError("away"))
    fields = {"AccessKey": "k", "Signature": "s"} if signed else {}
    now_s = [0.0]
    scene.context.clock = Clock(
        monotonic_s=lambda: now_s.__setitem__(0, now_s[0] + 2.0) or now_s[0]  # type: ignore[func-returns-value]
    )
    response = await scene.pull(200, flags=SUSPEND | COMMIT_OFFSET, commitOffset=200, hold_ms=20, **fields)
    await asyncio.sleep(0.05)
    assert scene.broker.commits == [200]
    assert (response.code, response.ext["nextBeginOffset"]) == ((20, "200") if signed else (0, "232"))


async def test_filters_hold_on_both_sides(tmp_path: Path) -> None:
    async with beside_a_broker(tmp_path, tags=True) as scene:
        scene.expire(150)
        scene.subscriptions.known = Subscription("t", "b")
        scene.broker.tag = "b"
        offset, seen = 0, []
        while offset < STORED:
            response = await scene.pull(offset)
            seen += scene.numbers(response)
            offset = int(response.ext["nextBeginOffset"])
        assert seen == list(range(1, STORED, 2))
        scene.subscriptions.known = Subscription("t", "TAGS = 'a'", SQL92)
        assert scene.numbers(await scene.pull(0, expressionType=SQL92, count=4)) == [0, 2, 4, 6]


@pytest.mark.parametrize("known", [None, Subscription("t", "TAGS = 'a'", SQL92, version=3)])
async def test_sql92_is_never_given_out_unfiltered(tmp_path: Path, known: Subscription | None) -> None:
    """Also not with an older expression than the pull's."""
    async with beside_a_broker(tmp_path, tags=True) as scene:
        scene.expire(150)
        scene.subscriptions.known = known
        response = await scene.pull(0, expressionType=SQL92, subVersion=4)
        # 20 means that looking took longer than the pull was to be held.
        assert response.code in (20, 24) and not response.body
        scene.broker.tag = "a"
        assert (await who(scene, 350, expressionType=SQL92, subVersion=4))[:2] == (BROKER, 0)


async def test_a_bad_expression_is_the_users_error(scene: Scene) -> None:
    scene.expire(150)
    response = await scene.pull(0, flags=SUBSCRIPTION, expressionType=SQL92, subscription="a = = 1")
    assert response.code == 23

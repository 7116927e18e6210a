"""Offsets, times and messages of archive and broker joined: answers of the broker, completed from the archive."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.policy.read_policy import ReadPolicies, ReadPolicy
from rocketmq_tiered.server.proxy.merged_lookups import ANSWER_BYTES_MAX, merged
from tests.kernels.record_builder import Message, encode
from tests.server.proxy.proxy_pulls import ARCHIVED, STORED, Scene, beside_a_broker
from tests.server.proxy.scripted_broker import phys_of, stored_ms_of
from tiered.errors import UnavailableError
from tiered.formats import fastjson
from tiered.formats.record import records_in
from tiered.remoting.command import FRAME_BYTES_MAX, RemotingCommand
from tiered.remoting.command import RequestCode as R

WAYS = pytest.mark.parametrize("with_files", [True, False], ids=["files", "word"])


async def offset(scene: Scene, code: int, **fields: object) -> int:
    """The offset answered."""
    response = await scene.ask(code, topic="t", queueId=0, **fields)
    assert response.code == 0
    return int(response.ext["offset"])


@WAYS
async def test_bounds_are_those_of_archive_and_broker(scene: Scene) -> None:
    minimum = scene.expire(150)
    assert await offset(scene, R.GET_MIN_OFFSET) == 0
    assert await offset(scene, R.GET_MAX_OFFSET) == STORED
    scene.policy("DISABLE")
    assert await offset(scene, R.GET_MIN_OFFSET) == minimum
    scene.policy("NOT_IN_DISK")
    response = await scene.ask(R.GET_MIN_OFFSET, topic="unknown", queueId=0)
    assert response.ext["offset"] == "-1"
    scene.broker.refuses[R.GET_MIN_OFFSET] = (16, "no permission")
    assert (await scene.ask(R.GET_MIN_OFFSET, topic="t", queueId=0)).code == 16


@WAYS
async def test_a_log_cut_back_does_not_lower_the_maximum(scene: Scene) -> None:
    for number in range(200, STORED):
        scene.store.put_unit("t", 0, number, bytes(20))
        del scene.store.records["t", 0][number]
    scene.forget()
    assert await offset(scene, R.GET_MAX_OFFSET) == ARCHIVED
    response = await scene.pull(ARCHIVED)
    assert (response.code, response.ext["nextBeginOffset"]) == (19, str(ARCHIVED))
    response = await scene.pull(250, count=4)
    assert response.code == 0 and response.ext["nextBeginOffset"] == "254", "from the archive"


@WAYS
async def test_without_the_broker_no_bound_is_guessed(scene: Scene) -> None:
    scene.expire(150)
    await scene.broker.kill()
    assert await offset(scene, R.GET_MIN_OFFSET) == 0, "nothing is below 0"
    for code in (R.GET_MAX_OFFSET, R.SEARCH_OFFSET_BY_TIMESTAMP):
        with pytest.raises(UnavailableError):
            await scene.ask(code, topic="t", queueId=0, timestamp=1 << 60)
    first_ms = stored_ms_of(scene.store.records["t", 0][0])
    assert await offset(scene, R.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=first_ms) == 0
    with pytest.raises(UnavailableError):
        await scene.ask(R.SEARCH_OFFSET_BY_TIMESTAMP, topic="t", queueId=0, timestamp=0, boundaryType="UPPER")
    response = await scene.ask(R.GET_EARLIEST_MSG_STORETIME, topic="t", queueId=0)
    assert int(response.ext["timestamp"]) == first_ms


@pytest.mark.parametrize(("policy", "with_files"), [("NOT_IN_DISK", True), ("FORCE", False)])
async def test_every_time_is_found_in_archive_and_broker(scene: Scene, policy: str) -> None:
    """As a broker that never deleted anything would answer."""

    scene.policy(policy)
    records = scene.store.records["t", 0]
    times = [stored_ms_of(records[number]) for number in range(STORED)]
    for limit in (150, 290):
        scene.expire(limit)
        for probe in sorted({times[0] - 1, *times[::2], times[-1], times[-1] + 1}):
            lower = next((n for n, time in enumerate(times) if time >= probe), STORED)
            upper = max((n for n, time in enumerate(times) if time <= probe), default=0)
            found = await offset(scene, R.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=probe)
            assert found == lower, (probe, times[0])
            found = await offset(scene, R.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=probe, boundaryType="UPPER")
            assert found == upper, (probe, times[0])
        response = await scene.ask(R.GET_EARLIEST_MSG_STORETIME, topic="t", queueId=0)
        assert int(response.ext["timestamp"]) == times[0]


@WAYS
async def test_a_broker_that_deletes_while_it_searches_gets_the_request_again(scene: Scene) -> None:
    scene.expire(100)
    probe = stored_ms_of(scene.store.records["t", 0][230])
    assert await offset(scene, R.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=probe) == 228

    def delete(command: RemotingCommand) -> None:
        if command.code == R.SEARCH_OFFSET_BY_TIMESTAMP:
            scene.expire(290)

    scene.broker.before = delete
    assert await offset(scene, R.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=probe) == 228
    assert await offset(scene, R.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=probe, boundaryType="UPPER") == 230
    scene.broker.refuses[R.GET_EARLIEST_MSG_STORETIME] = (16, "no permission")
    assert await offset(scene, R.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=probe) == 228


def stats(**row: object) -> bytes:
    key = '{"brokerName":"fx-a","queueId":0,"topic":"t"}'
    return f'{{"offsetTable":{{{key}:{json.dumps(row)}}},"consumeTps":1.5}}'.encode()


async def test_statistics_show_archive_and_broker(scene: Scene) -> None:
    body = stats(minOffset=scene.expire(150), maxOffset=STORED, lastUpdateTimestamp=7)

    async def answer(command: RemotingCommand) -> RemotingCommand:
        return RemotingCommand(0, 0, body=body)

    scene.broker.answer = answer  # type: ignore[method-assign]
    response = await scene.ask(R.GET_TOPIC_STATS_INFO, topic="t")
    document = fastjson.loads(b"".join(map(bytes, response.body)))
    (row,) = document["offsetTable"].values()
    assert row == {"minOffset": 0, "maxOffset": STORED, "lastUpdateTimestamp": 7}
    assert document["consumeTps"] == 1.5
    assert b'{{"brokerName":"fx-a"' in bytes(response.body[0]), "the only form Java reads"
    body = stats(brokerOffset=STORED, consumerOffset=50, pullOffset=60, lastTimestamp=0)
    response = await scene.ask(R.GET_CONSUME_STATS, consumerGroup="g")
    (row,) = fastjson.loads(bytes(response.body[0]))["offsetTable"].values()
    stored_ms = stored_ms_of(scene.store.records["t", 0][49])
    assert row == {
        "brokerOffset": STORED,
        "consumerOffset": 50,
        "pullOffset": 60,
        "lastTimestamp": stored_ms,
    }
    body = b"no JSON"
    assert (await scene.ask(R.GET_CONSUME_STATS, consumerGroup="g")).body == (b"no JSON",)


# -- messages -------------------------------------------------------------------------------------------------


async def test_a_message_by_id_wherever_it_is(scene: Scene) -> None:
    scene.expire(150)
    records = scene.store.records["t", 0]
    for number in (0, 250, 350):
        response = await scene.ask(R.VIEW_MESSAGE_BY_ID, topic="t", offset=phys_of(records[number]))
        assert b"".join(map(bytes, response.body)) == records[number]
    assert (await scene.ask(R.VIEW_MESSAGE_BY_ID, offset=phys_of(records[0]))).code == 0, "4.9 names no topic"
    assert (await scene.ask(R.VIEW_MESSAGE_BY_ID, topic="t", offset=12345)).code == 1
    for code, remark in ((16, "no permission"), (1, "org.apache.rocketmq.acl.common.AclException: no")):
        scene.broker.refuses[R.VIEW_MESSAGE_BY_ID] = (code, remark)
        response = await scene.ask(R.VIEW_MESSAGE_BY_ID, topic="t", offset=phys_of(records[0]))
        assert (response.code, list(response.body)) == (code, [])
    scene.broker.refuses.clear()
    scene.policy("DISABLE")
    for named in ({"topic": "t"}, {"topic": "another"}, {}):
        response = await scene.ask(R.VIEW_MESSAGE_BY_ID, offset=phys_of(records[0]), **named)
        assert (response.code, list(response.body)) == (1, []), "the broker alone answers for the topic"
    scene.router.apply(ReadPolicies(patterns=(("t", ReadPolicy.DISABLE),)))
    for named in ({"topic": "another"}, {}):
        assert (await scene.ask(R.VIEW_MESSAGE_BY_ID, offset=phys_of(records[0]), **named)).code == 1
    scene.router.apply(ReadPolicies())
    await scene.broker.kill()
    response = await scene.ask(R.VIEW_MESSAGE_BY_ID, topic="t", offset=phys_of(records[0]))
    assert b"".join(map(bytes, response.body)) == records[0]
    with pytest.raises(UnavailableError):
        await scene.ask(R.VIEW_MESSAGE_BY_ID, topic="t", offset=phys_of(records[350]))


def record(number: int, stored_ms: int, body_bytes: int = 1) -> bytes:
    data = bytearray(encode(Message(b"t", 0, number, bytes(body_bytes)), 1000 * number))
    data[56:64] = stored_ms.to_bytes(8, "big")
    return bytes(data)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans())), st.integers(1, 40))
def test_each_message_once_newest_first(places: list[tuple[int, bool, bool]], count: int) -> None:
    numbers = {number: (ours, theirs) for number, ours, theirs in places}
    ours = [record(number, number // 3) for number, (here, _) in numbers.items() if here]
    archived = [record(number, number // 3) for number, (_, there) in numbers.items() if there]
    everything = sorted((n for n, sides in numbers.items() if any(sides)), reverse=True)
    found = merged(list(records_in(b"".join(ours))), archived, count)
    assert [phys_of(bytes(data)) // 1000 for data in found] == everything[:count]


def test_messages_of_both_fit_into_a_frame() -> None:
    """The newest ones; a broker has answers of its own that do."""
    ours = [record(number, number, ANSWER_BYTES_MAX // 20) for number in range(0, 40, 2)]
    archived = [record(number, number, ANSWER_BYTES_MAX // 20) for number in range(1, 40, 2)]
    found = merged(ours, archived, 64)
    assert [phys_of(bytes(data)) // 1000 for data in found] == list(reversed(range(40)))[: len(found)]
    assert len(found) == 19 and sum(map(len, found)) <= ANSWER_BYTES_MAX < FRAME_BYTES_MAX
    (single,) = merged([record(1, 1, ANSWER_BYTES_MAX)], [record(0, 0)], 64)
    assert len(single) > ANSWER_BYTES_MAX


class Keyed:
    """An archive that finds these."""

    def __init__(self, *found: bytes) -> None:
        self.found = list(found)

    async def __call__(self, *_: object, **__: object) -> list[bytes]:
        return self.found


async def test_messages_by_key_come_from_both(scene: Scene) -> None:
    scene.expire(150)
    records = scene.store.records["t", 0]
    scene.archive.messages_by_key = Keyed(records[250], records[10])  # type: ignore[method-assign]
    wanted = {
        "topic": "t",
        "key": "x 250",
        "maxNum": 64,
        "beginTimestamp": 0,
        "endTimestamp": (1 << 63) - 1,
    }
    response = await scene.ask(R.QUERY_MESSAGE, **wanted)
    assert scene.numbers(response) == [250, 10], "250 once"
    assert response.ext["indexLastUpdateTimestamp"] == "5", "the broker's"
    scene.broker.refuses[R.QUERY_MESSAGE] = (16, "no permission")
    assert (await scene.ask(R.QUERY_MESSAGE, **wanted)).code == 16
    scene.broker.refuses[R.QUERY_MESSAGE] = (22, "nothing")
    assert scene.numbers(await scene.ask(R.QUERY_MESSAGE, **wanted)) == [250, 10]
    scene.archive.messages_by_key = Keyed()  # type: ignore[method-assign]
    assert (await scene.ask(R.QUERY_MESSAGE, **wanted)).code == 22
    scene.break_archive(UnavailableError("away"))
    with pytest.raises(UnavailableError):
        await scene.ask(R.QUERY_MESSAGE, **wanted)
    del scene.broker.refuses[R.QUERY_MESSAGE]
    assert scene.numbers(await scene.ask(R.QUERY_MESSAGE, **wanted)) == [250], "what is found is given"


async def test_the_archives_own_key_search_answers_while_the_broker_is_away(scene: Scene) -> None:
    await scene.broker.kill()
    with pytest.raises(UnavailableError):
        await scene.ask(R.QUERY_MESSAGE, topic="t", key="unknown", maxNum=4)
    scene.archive.messages_by_key = Keyed(scene.store.records["t", 0][3])  # type: ignore[method-assign]
    assert scene.numbers(await scene.ask(R.QUERY_MESSAGE, topic="t", key="k", maxNum=4)) == [3]


async def test_a_time_in_what_is_still_on_its_way_is_the_archives_end(scene: Scene) -> None:
    minimum = scene.expire(399)
    scene.forget()
    times = [stored_ms_of(scene.store.records["t", 0][n]) for n in (ARCHIVED - 1, minimum)]
    assert minimum > ARCHIVED and times[0] < times[1]
    assert await offset(scene, R.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=times[0] + 1) == ARCHIVED


@pytest.mark.parametrize("policy", ["FORCE", "DISABLE"])
async def test_a_message_of_another_topic_with_the_same_hash_is_not_returned(
    tmp_path: Path, policy: str
) -> None:
    """A broker's index has hashes of topic and key: a client can choose a key that meets another topic's."""
    async with beside_a_broker(tmp_path, policy=policy) as scene:
        scene.archive.messages_by_key = Keyed()  # type: ignore[method-assign]
        wanted = {"key": "x 250", "maxNum": 64}
        assert scene.numbers(await scene.ask(R.QUERY_MESSAGE, topic="t", **wanted)) == [250]
        assert not (await scene.ask(R.QUERY_MESSAGE, topic="mine", **wanted)).body

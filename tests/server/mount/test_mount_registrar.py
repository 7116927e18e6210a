"""A retired broker's registration: replaced, never removed first, and never beside a living master."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson

from rocketmq_tiered.server.backend.backend import TopicConfig
from rocketmq_tiered.server.mount.mounted_archive import MountRegistrar, registered_topics
from rocketmq_tiered.server.slave.registration import RegistrationState, SlaveConfig
from tests.server.slave.name_server_double import BROKER, CLUSTER, NameServerDouble
from tests.server.slave.until import until

OURS, EARLIER, MASTER = "10.0.0.5:10940", "10.0.0.6:10940", "10.0.0.1:10911"


@asynccontextmanager
async def registering(
    *, listed: str | None, holds: bool = True
) -> AsyncIterator[tuple[MountRegistrar, NameServerDouble, dict[str, TopicConfig]]]:
    server = NameServerDouble(master=listed)
    await server.start()
    topics = {
        "t": TopicConfig("t", 8, 8),
        "%LMQ%x": TopicConfig("%LMQ%x", 1, 1),
        "TBW102": TopicConfig("TBW102", 8, 8),
    }
    registrar = MountRegistrar(
        SlaveConfig(BROKER, "", (server.address,), OURS, 0),
        CLUSTER,
        lambda: topics,
        holds=lambda: holds,
        holders=lambda: {OURS, EARLIER},
    )
    registrar.start()
    try:
        async with asyncio.timeout(20):
            yield registrar, server, topics
    finally:
        await registrar.leave()
        await server.stop()


async def test_it_replaces_an_earlier_holder_and_stays_when_it_closes() -> None:
    async with registering(listed=EARLIER) as (registrar, server, _):
        await until(lambda: server.addresses == {0: OURS})
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REGISTERED)
        server.addresses = {0: EARLIER}  # a successor
        registrar.wake()
        await until(lambda: registrar.is_replaced)
        await registrar.leave()
        assert 104 not in server.codes()


async def test_it_does_not_register_beside_a_master() -> None:
    async with registering(listed=MASTER) as (registrar, server, _):
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        assert MASTER in registrar.statuses()[0].why
        assert server.addresses == {0: MASTER} and server.codes() == []


async def test_it_does_not_register_without_the_groups() -> None:
    async with registering(listed=None, holds=False) as (registrar, server, _):
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        assert server.codes() == []


async def test_it_unregisters_when_nothing_is_left() -> None:
    async with registering(listed=None) as (registrar, server, _):
        await until(lambda: server.addresses == {0: OURS})
        registrar.has_ended = True
        await registrar.leave()
        assert server.codes()[-1] == 104 and server.addresses == {}


async def test_a_new_topic_changes_the_data_version() -> None:
    async with registering(listed=None) as (registrar, server, topics):
        await until(lambda: server.codes().count(103) == 1)
        topics["%RETRY%g"] = TopicConfig("%RETRY%g", 1, 1)
        registrar.wake()
        await until(lambda: server.codes().count(103) == 2)
        first, second = (orjson.loads(one.body) for one in server.seen if one.code == 103)
        wrapper = "topicConfigSerializeWrapper"
        assert second[wrapper]["dataVersion"]["counter"] == first[wrapper]["dataVersion"]["counter"] + 1
        assert second[wrapper]["topicConfigTable"]["%RETRY%g"]["perm"] == 4


def test_topics_are_read_only_and_at_least_two() -> None:
    assert sorted(registered_topics({}, "c", "b")) == ["b", "c"]
    found = registered_topics(
        {"t": TopicConfig("t", 8, 8), "SCHEDULE_TOPIC_XXXX": TopicConfig("S", 18, 18)}, "c", "b"
    )
    assert sorted(found) == ["b", "c", "t"]
    assert {topic["perm"] for topic in found.values()} == {4}

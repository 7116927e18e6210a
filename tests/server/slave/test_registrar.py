"""Registering at name servers that come, go and list others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rocketmq_tiered.server.slave.registrar import SlaveRegistrar
from rocketmq_tiered.server.slave.registration import RegistrationState, SlaveConfig
from tests.server.slave.name_server_double import BROKER, NameServerDouble
from tests.server.slave.until import until

OURS, OTHER = "10.0.0.5:10931", "10.0.0.6:10931"


class MasterStatus:
    """What is known of the master. ``is_heard``: it still answers."""

    why: str | None = None
    is_available = True
    is_heard = True
    answers = 0

    def refusal(self) -> str | None:
        self.answers += self.is_heard
        return self.why


@asynccontextmanager
async def registering(
    *servers: NameServerDouble, period_s: float = 0.05
) -> AsyncIterator[tuple[SlaveRegistrar, NameServerDouble, MasterStatus]]:
    for server in servers:
        await server.start()
    addresses = tuple(server.address for server in servers)
    master = MasterStatus()
    place = SlaveConfig(BROKER, "10.0.0.1:10911", addresses, OURS, 7)
    registrar = SlaveRegistrar(place, period_s, master)
    registrar.start()
    try:
        async with asyncio.timeout(20):
            yield registrar, servers[0], master
    finally:
        await registrar.leave()
        for server in servers:
            await server.stop()


@pytest.mark.parametrize("is_5", [False, True])
async def test_it_is_listed_at_every_name_server_and_unregisters_from_all(is_5: bool) -> None:
    servers = NameServerDouble(is_5=is_5), NameServerDouble(is_5=is_5)
    async with registering(*servers) as (registrar, _, _):
        await until(lambda: all(server.addresses.get(7) == OURS for server in servers))
        await until(lambda: all(server.codes().count(103) >= 3 for server in servers))
        assert {status.state for status in registrar.statuses()} == {RegistrationState.REGISTERED}
        assert all(server.addresses[0] == "10.0.0.1:10911" for server in servers)
        await registrar.leave()
        assert all(server.codes()[-1] == 104 and 7 not in server.addresses for server in servers)
        assert {status.state for status in registrar.statuses()} == {RegistrationState.LEFT}


async def test_a_restarted_name_server_lists_it_again_before_it_knows_the_master() -> None:
    async with registering(NameServerDouble(), period_s=60) as (registrar, server, _):
        await until(lambda: server.addresses.get(7) == OURS)
        port = int(server.address.rpartition(":")[2])
        await server.stop()
        await until(lambda: registrar.statuses()[0].state is RegistrationState.UNREACHABLE)
        server.addresses = {}
        await server.start(port)
        await until(lambda: server.addresses == {7: OURS})


async def test_one_name_server_away_does_not_keep_it_from_the_others() -> None:
    away, other = NameServerDouble(), NameServerDouble()
    away.is_silent = True
    async with registering(away, other) as (registrar, _, _):

        def stand() -> RegistrationState:
            return registrar.statuses()[1].state

        await until(lambda: stand() is RegistrationState.REGISTERED)
        assert other.addresses.get(7) == OURS


async def test_an_id_that_is_taken_is_never_registered_until_it_is_free() -> None:
    taken = NameServerDouble()
    taken.addresses[7] = OTHER
    async with registering(taken) as (registrar, server, _):
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        assert "belongs to" in registrar.statuses()[0].why
        await until(lambda: len(server.seen) > 3)
        assert server.codes() == [] and server.addresses[7] == OTHER
        del server.addresses[7]
        await until(lambda: server.addresses.get(7) == OURS)


async def test_an_id_that_one_name_server_gives_to_another_is_not_taken_at_a_new_one() -> None:
    """One that has just started has heard of the master, and not yet of its slave."""

    knows, starts = NameServerDouble(), NameServerDouble()
    knows.addresses[7] = starts.addresses[7] = OTHER
    async with registering(knows, starts) as (registrar, _, _):
        await until(lambda: {status.state for status in registrar.statuses()} == {RegistrationState.REFUSED})
        del starts.addresses[7]
        at = len(starts.seen)
        await until(lambda: len(starts.seen) > at + 3)
        assert starts.codes() == [] and "another name server" in registrar.statuses()[1].why
        del knows.addresses[7]
        await until(lambda: all(server.addresses.get(7) == OURS for server in (knows, starts)))


@pytest.mark.parametrize("is_5", [False, True])
async def test_an_address_of_a_broker_of_another_name_is_not_registered_until_it_is_free(is_5: bool) -> None:
    """Name servers know who lives by address: that broker's entry would be ours, and end with us."""

    shared = NameServerDouble(is_5=is_5)
    shared.others["broker-z"] = {0: OURS}
    async with registering(shared) as (registrar, server, _):
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        assert f"{OURS} is listed as id 0 of broker-z" in registrar.statuses()[0].why
        await until(lambda: len(server.seen) > 3)
        assert server.codes() == [] and server.others == {"broker-z": {0: OURS}}
        server.others.clear()
        await until(lambda: server.addresses.get(7) == OURS)


@pytest.mark.parametrize("is_5", [False, True])
async def test_when_a_broker_of_another_name_comes_to_its_address_it_goes_and_takes_nothing_along(
    is_5: bool,
) -> None:
    async with registering(NameServerDouble(is_5=is_5)) as (registrar, server, _):
        await until(lambda: server.addresses.get(7) == OURS)
        server.others["broker-z"] = {0: OURS}
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        assert server.codes()[-1] == 104 and 7 not in server.addresses
        await registrar.leave()
        await asyncio.sleep(0.05)
        assert server.others == {"broker-z": {0: OURS}}, "it is not listed any more"


async def test_a_registration_under_way_when_it_ends_is_taken_back() -> None:
    slow = NameServerDouble()
    slow.takes_s = 0.3
    async with registering(slow) as (registrar, server, _):
        await until(lambda: server.codes() == [103])
        await registrar.leave()
        await asyncio.sleep(2 * slow.takes_s)
        assert server.codes() == [103, 104] and 7 not in server.addresses


@pytest.mark.parametrize("is_5", [False, True])
async def test_another_process_that_takes_its_id_keeps_it(is_5: bool) -> None:
    """Two that register over each other would flap; 4.9 unregisters the id's current owner."""
    async with registering(NameServerDouble(is_5=is_5), period_s=0.05) as (registrar, server, _):
        await until(lambda: server.addresses.get(7) == OURS)
        server.addresses[7] = OTHER
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        at = len(server.codes())
        await registrar.leave()
        assert len(server.codes()) <= at + 1 and 104 not in server.codes()
        assert server.addresses[7] == OTHER


async def test_when_the_master_leaves_no_place_it_goes_and_comes_back() -> None:
    async with registering(NameServerDouble(), period_s=0.05) as (registrar, server, master):
        await until(lambda: server.addresses.get(7) == OURS)
        master.why = "slaves act as master"
        registrar.wake()
        await until(lambda: registrar.statuses()[0].why == "slaves act as master")
        await until(lambda: 7 not in server.addresses)
        assert server.codes()[-1] == 104
        master.why = None
        await until(lambda: server.addresses.get(7) == OURS)


async def test_without_a_master_it_waits_for_one() -> None:
    async with registering(NameServerDouble(master=None)) as (registrar, server, _):
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        assert 103 not in server.codes()
        server.addresses[0] = "10.0.0.1:10911"
        await until(lambda: server.addresses.get(7) == OURS)
        del server.addresses[0]  # it dies: readers continue
        at = server.codes().count(103)
        await until(lambda: server.codes().count(103) > at + 1)
        assert server.addresses == {7: OURS}


async def test_success_without_being_listed_is_not_believed() -> None:
    ignoring = NameServerDouble()
    ignoring.ignores = True
    async with registering(ignoring) as (registrar, _, _):
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        assert "lists no broker as id 7 of broker" in registrar.statuses()[0].why


async def test_beside_a_master_that_was_replaced_it_goes_so_that_clients_find_the_new_one() -> None:
    async with registering(NameServerDouble()) as (registrar, server, master):
        await until(lambda: server.addresses.get(7) == OURS)
        master.is_available = False
        rounds = server.codes().count(103)
        await until(lambda: server.codes().count(103) > rounds + 2)  # it may only be starting again
        server.addresses[0] = OTHER
        await until(lambda: 7 not in server.addresses and OTHER in registrar.statuses()[0].why)
        master.is_available = True  # it is the same broker at a new address
        await until(lambda: server.addresses.get(7) == OURS)


async def test_an_unforeseen_error_ends_a_round_and_not_the_registrar() -> None:
    server, errors = NameServerDouble(), [RuntimeError("unforeseen")]

    class Failing(MasterStatus):
        def refusal(self) -> str | None:
            if errors:
                raise errors.pop()
            return None

    await server.start()
    registrar = SlaveRegistrar(SlaveConfig(BROKER, "m:1", (server.address,), OURS, 7), 0.05, Failing())
    registrar.start()
    await until(lambda: server.addresses.get(7) == OURS)
    await registrar.leave()
    await server.stop()


async def test_one_that_comes_to_its_address_while_it_registers_is_seen_before_the_next_round() -> None:
    slow = NameServerDouble()
    slow.takes_s = 0.1
    async with registering(slow, period_s=60) as (registrar, server, _):
        await until(lambda: server.codes() == [103])
        server.others["broker-z"] = {0: OURS}
        await until(lambda: registrar.statuses()[0].state is RegistrationState.REFUSED)
        assert server.codes() == [103, 104] and "id 0 of broker-z" in registrar.statuses()[0].why


async def test_a_name_that_no_host_can_have_is_a_name_server_out_of_reach() -> None:
    registrar = SlaveRegistrar(SlaveConfig(BROKER, "m:1", ("a..b:9876",), OURS, 7), 0.05, MasterStatus())
    registrar.start()
    await until(lambda: registrar.statuses()[0].state is RegistrationState.UNREACHABLE)
    await registrar.leave()

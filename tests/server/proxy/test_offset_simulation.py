"""Whatever broker, uploader and archive do while a consumer pulls, it is moved past no existing message (seeded;
see offset_simulation.py)."""

import asyncio
import random
from collections.abc import Iterable

import pytest

from tests.server.proxy.offset_simulation import Simulation
from tests.server.proxy.simulated_broker import World, archived_queue

POLICIES = ["NOT_IN_DISK", "NOT_IN_MEM", "FORCE"]


def live(seed: int, *, tells: bool = True) -> Simulation:
    """One schedule, chosen by ``seed``, to its end."""
    rand = random.Random(seed)
    world = World(rand, begins_late=rand.random() < 0.3, is_pinned=rand.random() < 0.7, tells=tells)
    world.send(rand.randrange(0, 60))
    if rand.random() < 0.5:
        world.delete(rand.randrange(0, 3))
    simulation = Simulation(
        world,
        rand.choice(POLICIES),
        with_files=tells and rand.random() < 0.5,
        is_filtered=tells and rand.random() < 0.4,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fetcher.policy.read_router.archived_queue", archived_queue)
        asyncio.run(simulation.run(rand.randrange(1, 40)))
    return simulation


def test_a_consumer_is_moved_past_no_existing_message() -> None:
    live_all(range(120))


def test_nor_where_the_broker_answers_pulls_only() -> None:
    """As to clients that may not request its bounds. What its filter skips cannot be proven then."""
    live_all(range(60), tells=False)


@pytest.mark.soak
@pytest.mark.parametrize("tells", [True, False])
def test_many_seeds(tells: bool) -> None:
    live_all(range(1000, 5000), tells=tells)


def live_all(seeds: Iterable[int], *, tells: bool = True) -> None:
    for seed in seeds:
        try:
            live(seed, tells=tells)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error

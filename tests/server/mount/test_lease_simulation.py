"""Simulated nodes share retired brokers: no two acknowledge a commit of the same group and queue, whatever fails."""

from __future__ import annotations

import pytest

from tests.server.mount.lease_world import World

SEEDS = 120


def test_no_two_holders_acknowledge() -> None:
    commits = moves = 0
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        commits += world.commits
        moves += world.moves
    assert commits > 20 * SEEDS and moves > 3 * SEEDS


@pytest.mark.soak
def test_no_two_holders_acknowledge_in_many_worlds() -> None:
    for seed in range(SEEDS, SEEDS + 10_000):
        World(seed).run()

"""Plays histories, many at once, and makes one that fails smaller."""

import gc
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.world.nodes import Nodes
from tests.world.world import EVERYONE, FAULTS, KILLS, World

STEPS = 120
Left = frozenset[str]
EVERYTHING: Left = frozenset()


def played(
    seed: int,
    steps: int = STEPS,
    without: Left = EVERYTHING,
    tell: Callable[[str], None] = lambda line: None,
) -> World:
    """The world at the end of a history. Raises what breaks a rule."""
    with tempfile.TemporaryDirectory(
        prefix="world-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as found:
        world = World(seed, Path(found), tell, without)
        world.run(steps)
    return world


def failure(seed: int, steps: int = STEPS, without: Left = EVERYTHING) -> str:
    """What is wrong with a history; empty: nothing."""
    try:
        played(seed, steps, without)
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


def _counts(seed: int, steps: int, without: Left) -> Counter[str]:
    try:
        return played(seed, steps, without).counts
    except Exception as error:
        return Counter({f"seed {seed}: {type(error).__name__}: {error}": 1})
    finally:
        gc.collect()


def _begun() -> None:
    """A worker looks for garbage after each history, not while it plays one."""
    gc.freeze()
    gc.disable()


def histories(seeds: Iterable[int], steps: int = STEPS, without: Left = EVERYTHING) -> Counter[str]:
    """What happened in all of them: steps and faults of each kind, and what is wrong with each seed that fails."""
    counts = Counter[str]()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork"), _begun) as pool:
        for found in pool.map(partial(_counts, steps=steps, without=without), seeds, chunksize=4):
            counts.update(found)
    return counts


def noticed_after(first: int, count: int) -> int:
    """How many histories from ``first`` on it takes until one fails; 0: none of ``count`` does."""
    seeds = range(first, first + count)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork"), _begun) as pool:
        for begin in seeds[::4]:
            some = range(begin, min(begin + 4, seeds.stop))
            for seed, found in zip(some, pool.map(failure, some), strict=True):
                if found:
                    return seed - first + 1
    return 0


def words(found: str) -> str:
    """What is wrong, of whatever queue, offset or object."""
    return re.sub(r"\S*\d\S*", "", found)


def shrunk(seed: int, steps: int) -> tuple[int, Left]:
    """The fewest steps with which ``seed`` fails in the same way, and what it may be without."""
    without: Left = EVERYTHING
    wanted = words(failure(seed, steps))
    assert wanted, f"seed {seed} does not fail in {steps} steps"
    for name in (
        KILLS,
        *(fault.name for fault, *_ in FAULTS),
        *(actor.name for actor in EVERYONE),
        Nodes.name,
    ):
        if words(failure(seed, steps, without | {name})) == wanted:
            without |= {name}
    for part in (2, 4, 8, 16, 32):
        while steps > part and words(failure(seed, steps - steps // part, without)) == wanted:
            steps -= steps // part
    return steps, without

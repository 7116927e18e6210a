"""Histories of the whole: no rule is broken, one seed is one history, and planted defects are caught."""

import logging
from collections.abc import Iterator

import pytest

from tests.soak.results import knob
from tests.world.defects import DEFECTS
from tests.world.histories import failure, histories, noticed_after, played
from tests.world.world import EVERYONE, FAULTS

SEEDS = 300
FAST = 40
CAUGHT_WITHIN = 300
ONCE_FAILED: dict[int, str] = {
    0: "timers were not delivered any more after a request failed while they were counted",
    5: "messages of an LMQ were not archived that their own queue had lost, as offsets were used again",
    24: "a repair showed messages that the log lost before a commit named them",
    63: "expiry committed a deletion list that garbage collection had deleted after a take-over",
    192: "a repair showed messages of a fenced writer that no commit had named",
    207: "a message that was archived in two generations of the gateway topic was sent twice",
    216: "expired messages came back, and twice, after a cut of the log below offsets that were used again",
    283: "a timer of a new, empty log was taken for one at the same place of the log before",
    350: "the first index file divided what compaction had joined since it was planned; rebuilt, it lacked keys",
    508: "a repair of a damaged commit showed messages of a fenced writer that no commit had named",
    780: "after a repair, what the log has of archived queues was taken for recreated ones, and archiving ended",
    1000: "timers were sent again after a repair",
    1040: "a repair put an object that it named into quarantine",
    1071: "entries of an LMQ were saved from messages of another log, with the same places",
    1125: "a node was ended by a claim whose version another one had written and removed",
    1372: "a timer was dropped, as its message had been missing at its place before the log was cut",
    1835: "a damaged object was replaced while compaction joined its run with others: one message was there twice",
    2200: "a message stayed that the log had lost, above the place from which a repair let it be read again",
    2375: "archiving stopped: an expired queue of offsets used twice changed when another queue ended",
    2407: "scrub saved the first of two messages with one offset, of which the archive had had the second",
}
"""What was wrong with seeds that failed, at their time: later changes of the world give them other histories."""


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def no_rule_is_broken(seeds: range) -> None:
    """Each actor acted, and each fault occurred."""
    counts = histories(seeds)
    failed = [what for what in counts if what.startswith("seed ")]
    assert not failed, failed
    expected = {*(actor.name for actor in EVERYONE), *(fault.name for fault, *_ in FAULTS), "master", "slave"}
    expected |= {"rounds", "floors", "rows read", "logs cut", "disks put back", "topics recreated"}
    expected |= {"timers handed over", "objects healed", "repairs", "restores", "offsets used again"}
    expected |= {
        "rounds of key compaction",
        "files deleted late",
        "master: FencedError",
        "slave: KilledError",
    }
    never = {what for what in expected if not counts[what]}
    assert not never, f"never: {sorted(never)}"


@pytest.mark.timeout(600)
def test_no_rule_is_broken() -> None:
    no_rule_is_broken(range(FAST))


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_no_rule_is_broken_in_hundreds_of_histories() -> None:
    no_rule_is_broken(range(FAST, SEEDS))


@pytest.mark.soak
def test_no_rule_is_broken_in_thousands_of_histories() -> None:
    no_rule_is_broken(range(SEEDS, knob("WORLD_SEEDS", 10_000)))


def test_a_seed_that_once_failed_does_not_fail() -> None:
    assert [found for seed in ONCE_FAILED if (found := failure(seed))] == []


def test_one_seed_is_one_history() -> None:
    assert len({played(3, 60).digest() for _ in range(2)}) == 1


@pytest.mark.soak
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(defect: str) -> None:
    with DEFECTS[defect].planted():
        is_caught = noticed_after(0, CAUGHT_WITHIN) or any(map(failure, ONCE_FAILED))
        assert is_caught, "no seed notices it"

"""The loop of tasks: steps until nothing is left, failures are tried again, and only the owner works."""

import threading
import time
from collections.abc import Callable

import pytest

from tiered.archive.task import Due, StoppedError, TaskLoop
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import AccessDeniedError, FencedError, UnavailableError

OWNED = CatalogState()


class Counting:
    """A task with ``left`` steps; ``fail`` may raise in each."""

    name = "counting"

    def __init__(self, left: int, due: Due | None = None, fail: Callable[[], object] = lambda: None) -> None:
        self.left, self.fail = left, fail
        self.due = due or Due(every_s=0.01)
        self.problem = ""
        self.done = self.plans = 0

    def plan(self, _state: CatalogState) -> int | None:
        self.plans += 1
        return self.left or None

    def step(self, _state: CatalogState, _plan: int) -> bool:
        self.fail()
        self.left, self.done = self.left - 1, self.done + 1
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_pass_ends_when_nothing_is_left() -> None:
    task = Counting(3)
    loop = TaskLoop(task, lambda: OWNED, clock=Clock(wall_ms=lambda: 77))
    assert loop.status.last_ms is None
    loop.make_pass()
    assert (task.done, task.plans) == (3, 4)
    assert (loop.status.name, loop.status.last_ms, loop.status.problem) == ("counting", 77, "")
    task.problem = "one could not be done"
    loop.make_pass()
    assert loop.status.problem == "one could not be done"


def test_only_the_owner_works() -> None:
    task, owned = Counting(3), [OWNED, OWNED, None]
    loop = TaskLoop(task, lambda: owned.pop(0))
    loop.make_pass()
    assert task.done == 2, "another writer took over in between"
    loop = TaskLoop(task, lambda: None)
    loop.make_pass()
    assert (task.done, loop.status.last_ms) == (2, None)


def test_failures_are_reported_and_tried_again() -> None:
    errors: list[Exception] = [AccessDeniedError("denied"), RuntimeError("a defect")]
    seen: list[str] = []

    def fail() -> None:
        seen.append(loop.status.problem)
        if errors:
            raise errors.pop(0)

    loop = TaskLoop(Counting(1, fail=fail), lambda: OWNED)
    thread = threading.Thread(target=loop.run)
    thread.start()
    until(lambda: loop.status.last_ms is not None)
    loop.stop()
    thread.join(20)
    assert seen[:3] == ["", "denied", "internal error: RuntimeError('a defect')"]
    assert (loop.status.failures, loop.status.problem) == (2, "")


@pytest.mark.parametrize("lasts", [False, True])
def test_an_outage_is_a_problem_only_if_it_lasts(lasts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered.archive.task.OUTAGE_S", 0.0 if lasts else 600.0)
    loop = TaskLoop(Counting(1, Due(every_s=3600), fail=unavailable), lambda: OWNED)
    thread = threading.Thread(target=loop.run)
    thread.start()
    until(lambda: loop.status.failures == 1)
    assert (loop.status.problem, loop.status.is_outage) == (("away", True) if lasts else ("", False))
    loop.stop()
    thread.join(20)


def unavailable() -> None:
    raise UnavailableError("away")


def test_a_fenced_pass_is_no_failure() -> None:
    def fail() -> None:
        loop.stop()
        raise FencedError("another writer took the archive over")

    loop = TaskLoop(Counting(1, fail=fail), lambda: OWNED)
    loop.run()
    assert (loop.status.failures, loop.status.problem) == (0, "")


@pytest.mark.parametrize("ends_itself", [False, True])
def test_a_loop_that_waits_to_be_woken_ends_at_once(ends_itself: bool) -> None:
    def fail() -> None:
        if ends_itself:
            raise StoppedError

    task = Counting(1, Due(every_s=None), fail)
    loop = TaskLoop(task, lambda: OWNED)
    thread = threading.Thread(target=loop.run)
    thread.start()
    if not ends_itself:
        until(lambda: task.done == 1)  # what an earlier process left
        task.left = 2
        loop.wake()
        until(lambda: task.done == 3)
        loop.stop()
    thread.join(20)
    assert not thread.is_alive()

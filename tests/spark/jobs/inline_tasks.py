"""A task runner without Spark: the same functions on the same data, through pickle, in this process."""

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

from rocketmq_tiered.spark.jobs.tasks import SparkTasks

T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P")


class InlineTasks(SparkTasks):
    """Runs tasks one after the other. ``before`` sees each one and may raise, as a dying task or driver does."""

    def __init__(self, before: Callable[[object], None] = lambda task: None, *, parallelism: int = 2) -> None:
        self._before = before
        self._parallelism = parallelism

    @property
    def parallelism(self) -> int:
        """See SparkTasks."""
        return self._parallelism

    def run(self, work: Callable[[T], R], tasks: Sequence[T], label: str) -> list[R]:
        """Tasks and results are copied, as they are on their way to a worker and back."""
        results = []
        for task in tasks:
            self._before(task)
            result: R = pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(task)))))
            results.append(result)
        return results

    def run_by_part(
        self,
        work: Callable[[T], list[tuple[int, P]]],
        tasks: Sequence[T],
        reduce: Callable[[list[P]], R],
        parts: int,
    ) -> list[R]:
        """See SparkTasks."""
        found: dict[int, list[P]] = {}
        for pieces in self.run(work, tasks, ""):
            for part, piece in pieces:
                assert 0 <= part < parts
                found.setdefault(part, []).append(piece)
        return self.run(reduce, list(found.values()), "")


class Twice(InlineTasks):
    """Repeats every task, as Spark does when its result was lost with an executor."""

    def run(self, work: Callable[[T], R], tasks: Sequence[T], label: str) -> list[R]:
        super().run(work, tasks, label)
        return super().run(work, tasks, label)

"""Runs plain functions on plain data, side by side: on Spark's executors, one task each.

Owns nothing but the hand-over. A task gets paths and options, opens what it needs, and returns a value; Spark repeats
a task that dies. Which task attempt it is, and how many there were in this application, is what ``attempt_number``
tells a worker. An error that repeating cannot help is brought home as it is, instead of being repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tiered import errors
from tiered.errors import TieredError, UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS_PER_TASK = 1000


class TaskRunner(Protocol):
    """Runs ``work`` on every task, results in order. Raises what a task raised, or an error that holds its text."""

    @property
    def parallelism(self) -> int:
        """How many tasks run at a time."""
        ...

    def run(self, work: Callable[[T], R], tasks: Sequence[T], label: str) -> list[R]:
        """May be called from several threads. ``work`` is a function of a module."""
        ...

    def cancel(self) -> None:
        """Stop what runs; best effort."""
        ...


class SparkTasks:
    """Tasks of one Spark session. Several stages may run at once."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._tag = f"rocketmq-tiered-{id(self):x}"

    @property
    def parallelism(self) -> int:
        """Spark's default parallelism: the cores of all executors."""
        return max(1, int(self._context.defaultParallelism))

    def run(self, work: Callable[[T], R], tasks: Sequence[T], label: str) -> list[R]:
        """One Spark task for each of ``tasks``."""
        if not tasks:
            return []
        self._context.addJobTag(self._tag)
        self._context.setJobDescription(label)
        rows: Any = self._context.parallelize(list(tasks), len(tasks))
        try:
            results = rows.map(_Guarded(work)).collect()
        except Exception as error:
            raise typed(error) or error from None
        for result in results:
            if isinstance(result, TieredError):
                raise result
        return list(results)

    def cancel(self) -> None:
        """Cancel the stages that were started here."""
        self._context.cancelJobsWithTag(self._tag)


class _Guarded:
    """Calls a function; returns, rather than raises, what another attempt would raise again."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __call__(self, task: Any) -> Any:
        try:
            return self._work(task)
        except UnavailableError:
            raise
        except TieredError as error:
            return error


_RAISED = re.compile(r"^tiered\.errors\.(\w+): (.*)$", re.MULTILINE)


def typed(error: BaseException) -> TieredError | None:
    """The project's error that a worker raised, found in the text of Spark's; None when there is none."""
    found = _RAISED.findall(str(error))
    if not found:
        return None
    name, message = found[-1]
    kind = getattr(errors, name, TieredError)
    made: TieredError = kind(message)
    return made


def attempt_number() -> int:
    """In a worker: a number no other task attempt of the application has, times ATTEMPTS_PER_TASK; 0 outside Spark."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else (int(context.taskAttemptId()) + 1) * ATTEMPTS_PER_TASK

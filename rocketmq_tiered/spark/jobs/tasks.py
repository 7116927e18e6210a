"""Runs plain functions on plain data on Spark's executors, one Spark task each.

A task gets paths and options, opens what it needs, and returns a value. Spark repeats a task that dies; permanent
errors are returned as values instead, and raised in the driver without a repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rocketmq_tiered.message_table.plan.archive_plan import archive_store
from tiered import errors
from tiered.errors import TieredError, UnavailableError
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class ArchiveTarget:
    """The URL of the archives, and options that open the object store."""

    url: str
    options: StoreOptions = field(default_factory=StoreOptions)

    @contextmanager
    def open(self, cluster: str, broker: str) -> Iterator[ObjectStore]:
        """The archive of one broker name."""
        with closing(open_store(self.url, self.options)) as root:
            yield archive_store(root, cluster, broker)


T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P")
Pieces = Callable[[T], list[tuple[int, P]]]
"""Divides a task into pieces, each with the number of its part."""


class SparkTasks:
    """Runs functions on tasks in parallel, in one Spark session. Several stages may run at once."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext

    @property
    def parallelism(self) -> int:
        """Spark's default parallelism, the cores of all executors."""
        return max(1, int(self._context.defaultParallelism))

    def run(self, work: Callable[[T], R], tasks: Sequence[T], label: str) -> list[R]:
        """Results of ``work``, a function of a module, in the order of ``tasks``: one Spark task for each. Thread-safe.
        Raises the error of a task, or one with its text."""
        if not tasks:
            return []
        self._context.setJobDescription(label)
        rows: Any = self._context.parallelize(list(tasks), len(tasks))
        return _collected(rows.map(_Guarded(work)))

    def run_by_part(
        self, work: Pieces[T, P], tasks: Sequence[T], reduce: Callable[[list[P]], R], parts: int
    ) -> list[R]:
        """Runs ``work`` on each task, which divides it into numbered pieces, shuffles the pieces by number, and calls
        ``reduce`` with all pieces of a number, in any order. Returns its ``parts`` results at most. Raises as
        ``run``."""
        if not tasks:
            return []
        rows: Any = self._context.parallelize(list(tasks), len(tasks))
        pieces = rows.flatMap(_GuardedPieces(work)).groupByKey(parts, partitionFunc=int)
        return _collected(pieces.map(_GuardedReduce(reduce)))


def _collected(rows: Any) -> list[Any]:
    """The results of all tasks. Raises the error that a task returned, or the typed error of a failed job."""
    try:
        results = rows.collect()
    except Exception as error:
        raise typed(error) or error from None
    for result in results:
        if isinstance(result, TieredError):
            raise result
    return list(results)


class _Guarded:
    """Calls a function and returns permanent errors instead of raising them."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __call__(self, task: Any) -> Any:
        try:
            return self._work(task)
        except UnavailableError:
            raise
        except TieredError as error:
            return error


class _GuardedPieces(_Guarded):
    def __call__(self, task: Any) -> Any:
        found = super().__call__(task)
        return [(0, found)] if isinstance(found, TieredError) else found


class _GuardedReduce(_Guarded):
    def __call__(self, task: Any) -> Any:
        pieces = list(task[1])
        failed = next((piece for piece in pieces if isinstance(piece, TieredError)), None)
        return super().__call__(pieces) if failed is None else failed


_RAISED = re.compile(r"^tiered\.errors\.(\w+): (.*)$", re.MULTILINE)


def typed(error: BaseException) -> TieredError | None:
    """The TieredError of a worker, parsed from the text of Spark's error; None without one."""
    found = _RAISED.findall(str(error))
    if not found:
        return None
    name, message = found[-1]
    parsed: TieredError = getattr(errors, name, TieredError)(message)
    return parsed

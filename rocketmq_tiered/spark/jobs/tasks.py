"""Runs plain functions on plain data on Spark's executors, one Spark task each.

A task gets paths and options, opens what it needs, and returns a value. Spark repeats a task that dies; permanent
errors are returned as values instead, and raised in the driver without a repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
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
        """Call ``work``, a function of a module, with each of ``tasks``, in a Spark task each, and return the results
        in this order. ``label`` is what Spark's pages show. Thread-safe. Raises the error of a task, or one with its
        text."""
        if not tasks:
            return []
        self._context.setJobDescription(label)
        rows: Any = self._context.parallelize(list(tasks), len(tasks))
        return _collected(rows.map(partial(_guarded, work)))

    def run_by_part(
        self, work: Pieces[T, P], tasks: Sequence[T], reduce: Callable[[list[P]], R], parts: int
    ) -> list[R]:
        """Call ``work`` with each of ``tasks``, which returns pieces with numbers below ``parts``; then, for each
        number, call ``reduce`` with all pieces that have it, in any order. Each call is a Spark task. Returns the
        results of ``reduce``. Raises as ``run``."""
        if not tasks:
            return []
        rows: Any = self._context.parallelize(list(tasks), len(tasks))
        pieces = rows.flatMap(partial(_guarded_pieces, work)).groupByKey(parts, partitionFunc=int)
        return _collected(pieces.map(partial(_guarded_reduce, reduce)))


def _collected(rows: Any) -> list[Any]:
    """The results of all tasks of the RDD ``rows``. Raises the error that a task returned; if the job failed, the
    TieredError in the text of Spark's error, or that error itself."""
    try:
        results = rows.collect()
    except Exception as error:
        raise typed(error) or error from None
    for result in results:
        if isinstance(result, TieredError):
            raise result
    return list(results)


def _guarded(work: Callable[[Any], Any], task: Any) -> Any:
    """The result of ``work``; a permanent error of it is returned, not raised, so that Spark does not repeat the
    task."""
    try:
        return work(task)
    except UnavailableError:
        raise
    except TieredError as error:
        return error


def _guarded_pieces(work: Callable[[Any], Any], task: Any) -> Any:
    """As ``_guarded``, for ``work`` that returns pieces: an error is the only piece."""
    pieces = _guarded(work, task)
    return [(0, pieces)] if isinstance(pieces, TieredError) else pieces


def _guarded_reduce(reduce: Callable[[Any], Any], numbered: tuple[int, Iterable[Any]]) -> Any:
    """As ``_guarded``, for ``reduce`` of all pieces that have one number: an error among them is the result."""
    pieces = list(numbered[1])
    error = next((piece for piece in pieces if isinstance(piece, TieredError)), None)
    return _guarded(reduce, pieces) if error is None else error


_RAISED = re.compile(r"^tiered\.errors\.(\w+): (.*)$", re.MULTILINE)


def typed(error: BaseException) -> TieredError | None:
    """The TieredError that a worker raised, made again from the text of Spark's ``error``; None if it has none."""
    raised = _RAISED.findall(str(error))
    if not raised:
        return None
    name, message = raised[-1]
    parsed: TieredError = getattr(errors, name, TieredError)(message)
    return parsed

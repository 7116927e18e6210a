"""Progress of Spark's stages on stderr while a query runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rocketmq_tiered.spark.cli.job_progress import PROGRESS_S, Progress

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession


@contextmanager
def stage_progress(spark: SparkSession, label: str, *, quiet: bool = False) -> Iterator[None]:
    """Print finished tasks, of those that Spark has scheduled so far, while the block runs."""
    if quiet or not hasattr(spark, "_jsc"):  # Spark Connect has no tracker
        yield
        return
    finished = threading.Event()
    progress = Progress(f"{label}, tasks:", as_text=lambda tasks: f"{tasks:.3g}")
    watch = threading.Thread(
        target=_watch, args=(spark.sparkContext.statusTracker(), progress, finished), daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        finished.set()
        watch.join()


def _watch(tracker: StatusTracker, progress: Progress, finished: threading.Event) -> None:
    last: dict[int, tuple[int, int]] = {}
    while not finished.wait(PROGRESS_S):
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is None or last.get(stage) == (info.numCompletedTasks, info.numTasks):
                continue
            last[stage] = info.numCompletedTasks, info.numTasks
            progress.update(info.numCompletedTasks, info.numTasks, f"stage {stage}")

"""How far Spark's stages are, said on stderr every few seconds while a query runs.

Owns asking Spark; the line is output.py's. Jobs that hand tasks over themselves report by their own measure instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.cli.progress import PROGRESS_S, Progress

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession


@contextmanager
def stage_progress(spark: SparkSession, label: str, *, quiet: bool = False) -> Iterator[None]:
    """Says the tasks done, of all that Spark knows of by now, for as long as the block runs."""
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
    known: dict[int, tuple[int, int]] = {}
    while not finished.wait(PROGRESS_S):
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is None or known.get(stage) == (info.numCompletedTasks, info.numTasks):
                continue
            known[stage] = info.numCompletedTasks, info.numTasks
            progress.update(info.numCompletedTasks, info.numTasks, f"stage {stage}")

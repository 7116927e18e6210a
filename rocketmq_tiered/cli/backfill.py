"""`tiered backfill`: archive a store directory once; resumable."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rocketmq_tiered.cli.arguments import add_json, add_writer_flags, settings_of
from rocketmq_tiered.process.allocator import return_freed_memory
from rocketmq_tiered.process.logs import log_plain
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.process.uploader_job import UploaderJob, Writer
from tiered.console import camel_names, print_json, print_lines
from tiered.object_store.request_metrics import StoreMetrics
from uploader.offload import OffloadResult
from uploader.outage_limit import AGAIN, OutageLimit
from uploader.outcome_text import outcome_text

EXIT_ANOMALIES = 1
EXIT_INTERRUPTED = 130
INTERRUPTED = f"interrupted; {AGAIN}"
POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """STORE, ARCHIVE_URL and writer flags."""
    parser.add_argument("broker.store_path", metavar="STORE", help="the broker's store directory")
    parser.add_argument("archive.url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    add_writer_flags(parser)
    parser.add_argument(
        "--replace-log", dest="archive.replace_log", action="store_const", const="true", default=None,
        help="continue even if archived messages are missing from the store's log; they are hidden",
    )  # fmt: skip
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Archive to the end of the log, from where the archive ends. Damage is exit code 1."""
    return_freed_memory()
    settings = settings_of(options).settings
    log_plain(settings.process.log_level)
    writer = Writer(_instance(settings.broker.store_path), "backfill", settings.archive.take_over)
    job = UploaderJob(settings, writer, StoreMetrics())
    stop = threading.Event()
    with _set_by_signals(stop), Progress("backfill", 0, quiet=options.json) as progress:
        limits = settings.process
        outage_limit = OutageLimit(limits.patience_ms / 1000, limits.drain_timeout_ms / 1000)
        result = _run(job, stop, progress, outage_limit)
    title = f"{job.names.cluster}/{job.names.broker} in {settings.archive.url}"
    if options.json:
        print_json(camel_names(asdict(result)) | {"interrupted": stop.is_set()})
    else:
        print_lines(f"{title}: {outcome_text(result)}")
        if stop.is_set():
            print_lines(INTERRUPTED)
    if stop.is_set():
        return EXIT_INTERRUPTED
    return EXIT_ANOMALIES if result.damaged or result.lost else 0


def _run(
    job: UploaderJob, stop: threading.Event, progress: Progress, outage_limit: OutageLimit
) -> OffloadResult:
    """The uploader in a thread, progress and signals in this one."""
    outcome: list[OffloadResult] = []
    failure: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            outcome.append(job.offload(stop, follow=False))
        except BaseException as error:  # raised in the main thread
            failure.append(error)
        finally:
            ended.set()

    threading.Thread(target=work, name="uploader", daemon=True).start()
    first_phys: int | None = None
    while not ended.wait(POLL_S):
        status = job.offloader.status()
        now_s = time.monotonic()
        outage_limit.check(
            status, is_stopping=stop.is_set(), now_s=now_s, retry_reason=job.offloader.retry_reason
        )
        if status is not None:
            first_phys = status.committed_phys if first_phys is None else first_phys
            progress.update(status.committed_phys - first_phys, job.expected_end_phys(status) - first_phys)
    if failure:
        raise failure[0]
    done = outcome[0].to_phys - (outcome[0].from_phys if first_phys is None else first_phys)
    progress.update(done, done)
    return outcome[0]


@contextmanager
def _set_by_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C set ``stop``. The second ends the process at once, without interpreter shutdown
    under threads in compiled code; uncommitted messages are still in the log."""

    def interrupted(*_: object) -> None:
        if stop.is_set():
            print_lines(f"tiered: {INTERRUPTED}", file=sys.stderr)
            os._exit(EXIT_INTERRUPTED)
        stop.set()

    previous = signal.signal(signal.SIGTERM, lambda *_: stop.set()), signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous[0])
        signal.signal(signal.SIGINT, previous[1])


def _instance(store: str) -> str:
    """Stable per store and host, so that a killed backfill can be repeated at once."""
    place = f"{os.uname().nodename}\0{Path(store).absolute()}"
    return f"backfill-{hashlib.sha256(place.encode()).hexdigest()[:16]}"

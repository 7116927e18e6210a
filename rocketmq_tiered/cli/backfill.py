"""`tiered backfill`: archive a store directory once; resumable."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rocketmq_tiered.cli.arguments import add_json, add_switch, add_writer_flags, print_result, settings_of
from rocketmq_tiered.process.allocator import return_freed_memory
from rocketmq_tiered.process.instance import backfill_instance
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.process.uploader_job import UploaderJob, Writer
from tiered.console import camel_names, print_lines
from tiered.object_store.request_metrics import StoreMetrics
from uploader.bounded_run import AGAIN, OutageLimit, run_bounded
from uploader.offload_status import OffloadResult, OffloadStatus, outcome_text

EXIT_ANOMALIES = 1
EXIT_INTERRUPTED = 130
INTERRUPTED = f"interrupted; {AGAIN}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the store directory, the archive's URL and the flags of a verb that writes an archive."""
    parser.add_argument("broker.store_path", metavar="STORE", help="the broker's store directory")
    parser.add_argument("archive.url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    add_writer_flags(parser)
    missing = "archive a log that lacks archived messages or differs from them; these are hidden from readers"
    add_switch(parser, "--replace-log", "archive.replace_log", missing)
    same = (
        "confirm that the store is the archived broker's, though topics were recreated or its address changed"
    )
    add_switch(parser, "--same-broker", "archive.same_broker", same)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Archive the store's log, from where the archive ends to the end of the log. Exit code 1 if anything was damaged,
    lost, or set aside (messages whose queue offset is taken, which readers do not get); 130 after a signal."""
    return_freed_memory()
    settings = settings_of(options).settings
    writer = Writer(backfill_instance(settings.broker.store_path), "backfill", settings.archive.take_over)
    job = UploaderJob(settings, writer, StoreMetrics())
    stop = threading.Event()
    with _set_by_signals(stop), Progress("backfill", 0, quiet=options.json) as progress:
        outage_limit = OutageLimit(drain_s_max=settings.process.drain_timeout_ms / 1000)
        result = _run(job, stop, progress, outage_limit)
    title = f"{job.names.cluster}/{job.names.broker} in {settings.archive.url}"
    lines = [f"{title}: {outcome_text(result)}", *([INTERRUPTED] if stop.is_set() else ())]
    print_result(options, camel_names(asdict(result)) | {"interrupted": stop.is_set()}, lines)
    if stop.is_set():
        return EXIT_INTERRUPTED
    is_whole = not (result.damaged or result.lost or result.damaged_tables or result.set_aside)
    return 0 if is_whole else EXIT_ANOMALIES


def _run(
    job: UploaderJob, stop: threading.Event, progress: Progress, outage_limit: OutageLimit
) -> OffloadResult:
    """Run the uploader in a thread of its own; this thread draws the progress and handles signals."""
    first_phys: int | None = None  # physical offset where the progress begins, known at the first report

    def observe(status: OffloadStatus) -> None:
        nonlocal first_phys
        first_phys = status.committed_phys if first_phys is None else first_phys
        progress.update(status.committed_phys - first_phys, job.expected_end_phys(status) - first_phys)

    result = run_bounded(lambda: job.offload(stop, follow=False), job.offloader, outage_limit, stop, observe)
    done = result.to_phys - (result.from_phys if first_phys is None else first_phys)
    progress.update(done, done)
    return result


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

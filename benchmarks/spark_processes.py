"""The processes below this one that Spark runs: CPU time of all, peak memory of the Python workers.

Owns /proc. What is measured is in spark.py.
"""

import os
import threading
from pathlib import Path

from benchmarks.machine import process_core_s

SAMPLE_S = 0.05


class WorkerWatch(threading.Thread):
    """Largest VmHWM of any Python worker below this process, since it began (workers outlive a run)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._finished = threading.Event()
        self.peaks_bytes: dict[int, int] = {}

    @property
    def peak_bytes(self) -> int:
        """Of the largest one."""
        return max(self.peaks_bytes.values(), default=0)

    def run(self) -> None:
        """Look again and again."""
        while not self._finished.wait(SAMPLE_S):
            for pid in descendants(os.getpid()):
                if size_bytes := worker_bytes(pid):
                    self.peaks_bytes[pid] = size_bytes

    def stop(self) -> None:
        """The run is over."""
        self._finished.set()
        self.join()


def descendants(pid: int) -> list[int]:
    """Processes below ``pid`` that live now."""
    children = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in tasks.read_text().split()]
        except OSError:
            continue
    return children + [below for child in children for below in descendants(child)]


def all_core_s() -> float:
    """CPU seconds of this process, the JVM and all workers that live."""
    own = os.getpid()
    return sum(map(process_core_s, (own, *descendants(own))))


def jvm_core_s() -> float:
    """CPU seconds of the JVM alone."""
    return sum(process_core_s(pid) for pid in descendants(os.getpid()) if b"java" in command_line(pid)[:200])


def worker_bytes(pid: int) -> int:
    """VmHWM of a Python worker; 0 for any other process."""
    if b"pyspark.daemon" not in command_line(pid):
        return 0
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peaks = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0].split()[1]) * 1024 if peaks else 0


def command_line(pid: int) -> bytes:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

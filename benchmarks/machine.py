"""Measures child processes, the load of others, and the page cache.

Owns /proc, wait4 and mincore. Does not own what is measured. Figures include the
cores that others used: distrust one above a fifth of a core.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_S = 0.02
QUIET_CORES_MAX = 0.1
QUIET_S = 2.0
COPY_BYTES = 4 * 1024 * 1024
CONTROL_BYTES = 256 * 1024 * 1024

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class ChildRun:
    """One child process from start to end; CPU includes grandchildren it waited for."""

    exit_code: int
    wall_s: float
    user_s: float
    system_s: float
    peak_rss_bytes: int
    """VmHWM."""
    peak_anonymous_bytes: int
    rss_samples: list[tuple[float, int]] = field(repr=False)
    """(seconds since start, resident bytes), every SAMPLE_S."""
    others_cores: float
    """Cores used by all other processes during the run."""
    output: str = field(repr=False)

    @property
    def cpu_s(self) -> float:
        """User and system time together."""
        return self.user_s + self.system_s


def run_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    friends: Sequence[int] = (),
    bytecode_cache: Path | None = None,
) -> ChildRun:
    """Run ``command`` to its end. CPU of ``friends`` (a local object store) does not count as others'.

    ``bytecode_cache`` is where a Python child finds its modules compiled, as an installed program does, even if
    this interpreter does not write bytecode.
    """
    busy_before, friends_before = busy_core_s(), sum(map(process_core_s, friends))
    started = time.perf_counter()
    variables = {**os.environ, **(environment or {})}
    if bytecode_cache is not None:
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        variables["PYTHONPYCACHEPREFIX"] = str(bytecode_cache)
    child = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watch = _MemoryWatch(child.pid, started)
    watch.start()
    assert child.stdout is not None
    output = child.stdout.read().decode("utf-8", "replace")
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    watch.stop()
    own_core_s = usage.ru_utime + usage.ru_stime + sum(map(process_core_s, friends)) - friends_before
    return ChildRun(
        exit_code=child.returncode,
        wall_s=wall_s,
        user_s=usage.ru_utime,
        system_s=usage.ru_stime,
        peak_rss_bytes=watch.peak_rss_bytes,
        peak_anonymous_bytes=watch.peak_anonymous_bytes,
        rss_samples=watch.samples,
        others_cores=others_cores(busy_before, own_core_s, wall_s),
        output=output,
    )


def busy_core_s() -> float:
    """Seconds all cores together were busy since boot."""
    fields = Path("/proc/stat").read_text("ascii").partition("\n")[0].split()
    return sum(int(fields[i]) for i in (1, 2, 3, 6, 7, 8)) / _TICKS_PER_S


def process_core_s(pid: int) -> float:
    """CPU seconds process ``pid`` has used; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def others_cores(busy_before_core_s: float, own_core_s: float, wall_s: float) -> float:
    """Cores busy with something else since ``busy_before_core_s`` was read."""
    return round(max(0.0, (busy_core_s() - busy_before_core_s - own_core_s) / max(wall_s, 1e-9)), 2)


class _MemoryWatch(threading.Thread):
    def __init__(self, pid: int, started: float) -> None:
        super().__init__(daemon=True, name=f"memory-of-{pid}")
        self._status, self._began = Path(f"/proc/{pid}/status"), started
        self._finished = threading.Event()
        self.peak_rss_bytes = self.peak_anonymous_bytes = 0
        self.samples: list[tuple[float, int]] = []

    def run(self) -> None:
        while not self._finished.wait(SAMPLE_S):
            try:
                status = self._status.read_text("ascii", "replace")
            except OSError:
                return
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if "VmRSS" not in fields:
                return
            self.samples.append((round(time.perf_counter() - self._began, 3), _bytes_of(fields["VmRSS"])))
            self.peak_rss_bytes = max(self.peak_rss_bytes, _bytes_of(fields["VmHWM"]))
            self.peak_anonymous_bytes = max(self.peak_anonymous_bytes, _bytes_of(fields["RssAnon"]))

    def stop(self) -> None:
        self._finished.set()
        self.join()


def peak_rss_bytes(pid: int | str) -> int:
    """VmHWM of the process ``pid`` ("self": of this one) alone, without its children."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    return next(_bytes_of(line.partition(":")[2]) for line in lines if line.startswith("VmHWM"))


def _bytes_of(field_text: str) -> int:
    return int(field_text.split(maxsplit=1)[0]) * 1024


def await_quiet(limit_s: float) -> None:
    """Wait until others leave the machine alone for QUIET_S, or until ``limit_s`` is over."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        busy_before, cpu_before, began = busy_core_s(), time.process_time(), time.perf_counter()
        time.sleep(QUIET_S)
        wall_s = time.perf_counter() - began
        if others_cores(busy_before, time.process_time() - cpu_before, wall_s) < QUIET_CORES_MAX:
            return


def log_files(store: Path) -> list[Path]:
    """The commitlog files of a store, oldest first."""
    return sorted(path for path in (store / "commitlog").iterdir() if path.name.isdigit())


def copy_and_fsync(store: Path, target: Path, log_bytes: int) -> tuple[float, float]:
    """(wall, CPU) seconds to copy the first ``log_bytes`` of the commitlog into ``target`` and fsync it."""
    buffer = memoryview(bytearray(COPY_BYTES))
    left = log_bytes
    cpu, started = time.process_time(), time.perf_counter()
    with target.open("wb", buffering=0) as copy:
        for path in log_files(store):
            with path.open("rb", buffering=0) as source:
                while left > 0 and (count := source.readinto(buffer[: min(left, COPY_BYTES)])):
                    copy.write(buffer[:count])
                    left -= count
        os.fsync(copy.fileno())
    took = time.perf_counter() - started, time.process_time() - cpu
    target.unlink()
    return took


def warm(store: Path) -> None:
    """Read commitlog and consume queues once: beside a broker that just wrote them, they are in the page cache."""
    buffer = bytearray(COPY_BYTES)
    for path in log_files(store):
        with path.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass
    for path in (store / "consumequeue").glob("*/*/*"):
        with path.open("rb", buffering=0) as source:
            written = min(os.lseek(source.fileno(), 0, os.SEEK_HOLE), COPY_BYTES)
            source.readinto(memoryview(buffer)[:written])


def hot_control_file(path: Path) -> Path:
    """A file of CONTROL_BYTES, all of it in the page cache now."""
    if not path.exists():
        path.write_bytes(os.urandom(CONTROL_BYTES))
        os.sync()
    path.read_bytes()
    return path


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Let the kernel forget clean pages of ``paths`` (POSIX_FADV_DONTNEED); needs no privilege."""
    os.sync()
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def resident_bytes(paths: Sequence[Path]) -> int:
    """How much of ``paths`` is in the page cache (mincore)."""
    return sum(_resident_pages(path) for path in paths) * _PAGE_BYTES


def _resident_pages(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view,
    ):
        vector = (ctypes.c_ubyte * -(-size // _PAGE_BYTES))()
        anchor = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), vector)
        del anchor
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        return sum(byte & 1 for byte in bytes(vector))


def note(text: str) -> None:
    """A line about progress; results go elsewhere."""
    print(text, file=sys.stderr, flush=True)

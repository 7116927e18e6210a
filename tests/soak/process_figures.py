"""What the kernel says about a running process. Owns /proc; judges nothing."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, name: str) -> int:
    """A field of /proc/PID/status, such as VmHWM or RssAnon."""
    status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields[name].split(maxsplit=1)[0]) * 1024


def peak_rss_bytes(pid: int) -> int:
    """The most memory that was resident, file pages included."""
    return memory_bytes(pid, "VmHWM")


def core_seconds(pid: int) -> float:
    """CPU seconds used since the start."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

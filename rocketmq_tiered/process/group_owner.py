"""The name of a process that owns an archive's consumer groups, and whether such a process still runs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def own_name() -> str:
    """``host/boot.namespace:pid`` of this process. Host names may repeat; process ids are per namespace."""
    return f"{_own_place()}:{os.getpid()}"


def _own_place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        numbers = secrets.token_hex(8)  # unknown: unique
    return f"{os.uname().nodename}/{numbers}"


def is_gone(owner_name: str) -> bool:
    """Whether it was a process of this machine and namespace that no longer runs: its lease need not expire."""
    place, _, pid = owner_name.rpartition(":")
    if place != _own_place() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False

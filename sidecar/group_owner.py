"""How a process that owns an archive's consumer groups calls itself, and whether one of that name still runs."""

from __future__ import annotations

import os


def own_name() -> str:
    """``host:pid`` of this process."""
    return f"{os.uname().nodename}:{os.getpid()}"


def is_gone(owner_name: str) -> bool:
    """Whether it was a process of this machine that does not run any more: no need to wait for its lease."""
    host, _, pid = owner_name.rpartition(":")
    if host != os.uname().nodename or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False

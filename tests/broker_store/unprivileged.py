"""Runs a piece of a test as a user who owns nothing (uid 65534)."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

UNPRIVILEGED_UID = 65534


def run_unprivileged(work: Callable[[], str], *directories: Path) -> str:
    """What ``work`` returns when run in a child process as an unprivileged user; its failure is the caller's.

    ``directories`` and those above them are opened for passing through. Needs root.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    for directory in directories:
        for step in (directory, *directory.parents):
            if step.stat().st_uid == 0 and step != Path("/"):
                step.chmod(step.stat().st_mode | 0o711)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receive)
            os.setgroups([])
            os.setresgid(UNPRIVILEGED_UID, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
            os.setresuid(UNPRIVILEGED_UID, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
            os.write(send, work().encode())
            status = 0
        except BaseException:
            os.write(send, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, text
    return text

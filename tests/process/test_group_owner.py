"""Owners of groups, by name: only a process that certainly ended is gone, so that no running one loses its groups."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rocketmq_tiered.process.group_reset import is_gone, own_name
from rocketmq_tiered.server.groups.group_state import GroupLog
from tests.server.group_clock import LEASE_MS, Time
from tiered.clock import Clock
from tiered.errors import FencedError
from tiered.object_store.memory import MemoryStore

NAMED = """
import sys
from rocketmq_tiered.process.group_reset import own_name
print(own_name(), flush=True)
sys.stdin.read()
"""
AS_A_NUMBER_THAT_IS_FREE = f"""
import os
from tiered.clock import Clock
while (child := os.fork()) or os.path.exists(f"/proc/{{os.getpid()}}"):
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
{NAMED}
"""
"""``/proc`` is still that of the machine."""
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", *(() if os.geteuid() == 0 else ("--map-root-user",)))


@contextmanager
def running(code: str, *before: str) -> Iterator[str]:
    """The name of a process, while it runs."""
    command = [*before, sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        name = process.stdout.readline().strip()
        if before and not name:
            pytest.skip(f"no PID namespace can be made here: {process.stderr.read().strip()}")
        try:
            yield name
        finally:
            process.kill()


def test_a_process_is_gone_when_it_ended_and_not_before() -> None:
    assert own_name() == own_name() and not is_gone(own_name())
    with running(NAMED) as name:
        assert name and not is_gone(name)
    assert is_gone(name)


def test_who_runs_in_another_container_of_the_same_host_name_is_not_gone() -> None:
    """No process here has its number, or another one has it."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed: no PID namespace can be made")
    with running(AS_A_NUMBER_THAT_IS_FREE, *UNSHARE) as name:
        place, _, pid = name.rpartition(":")
        assert place.startswith(f"{os.uname().nodename}/") and not Path(f"/proc/{pid}").exists()
        store, clock = MemoryStore(), Time()
        first = GroupLog(store, name, Clock(wall_ms=clock))
        first.claim(LEASE_MS)
        with pytest.raises(FencedError, match=f":{pid}, which wrote their offsets 0 s ago"):
            GroupLog(store, own_name(), Clock(wall_ms=clock), is_gone=is_gone).claim(LEASE_MS)
        first.write({("g", "t"): {0: 9}})


def test_another_machine_of_the_same_name_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(NAMED) as name:
        pass
    host, _, rest = name.partition("/")
    boot, _, numbers = rest.partition(".")
    assert is_gone(f"{host}/{boot}.{numbers}")
    pid = numbers.rpartition(":")[2]
    for other in (f"{host}/{boot[::-1]}.{numbers}", f"{host}:{pid}", f"other/{rest}", pid, "", f"{name}x"):
        assert not is_gone(other), other

    def unreadable(*_: object, **__: object) -> str:
        raise PermissionError("/proc is hidden")

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert own_name() != own_name(), "its process number is unknown here: others wait for it"
    assert not is_gone(name)

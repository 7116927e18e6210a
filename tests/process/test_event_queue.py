"""The main thread's event queue: signals wake it whichever thread receives them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rocketmq_tiered.process.event_queue import EventQueue

ROOT = Path(__file__).parents[2]

CHILD = """
import os, resource, signal, sys, threading, time
from rocketmq_tiered.process.event_queue import EventQueue
# As many open files as a broker with thousands of queues takes: more than select() can wait for.
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [os.dup(1) for _ in range(1100)]
events = EventQueue()
events.wake_on_signals()
signal.signal(signal.SIGHUP, lambda *_: events.put("reload"))
# A thread that takes every signal: the kernel may choose any, and this one never runs Python handlers.
threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
print("ready", flush=True)
sys.exit(0 if events.get(20) == "reload" else 1)
"""


def test_a_signal_delivered_to_another_thread_wakes_the_receiver() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.05)
        began_s = time.monotonic()
        child.send_signal(signal.SIGHUP)
        assert child.wait(15) == 0
        assert time.monotonic() - began_s < 5


def test_an_event_that_is_sent_after_the_end_is_written_to_no_other_file(tmp_path: Path) -> None:
    events = EventQueue[str]()
    events.close()
    with (tmp_path / "file").open("wb"), (tmp_path / "other").open("wb"):
        events.put("stop")
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b""}

"""After the warm-ups the first cycle compiles no kernel of the scan or of segments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.fetcher.broker_store_writer import WrittenStore

SCRIPT = """
import gc, json, sys
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from tests.end_to_end.offloading import backfill
from tiered.formats import segment
from tiered.kernels import scan
from tiered.object_store.memory import MemoryStore

def compiled():
    kernels = [one for one in gc.get_objects() if isinstance(one, Dispatcher)]
    return {one.py_func.__qualname__: len(one.signatures) for one in kernels if one.signatures}

scan.warm_up()
scanning = compiled()
segment.warm_up()
warm = compiled()
result = backfill(Path(sys.argv[1]), MemoryStore())
print(json.dumps([result.messages, scanning, warm, compiled()]))
"""
INDEX_KERNELS = {"_count_queues", "_place_rows", "_fill_slots"}
"""Of index files, which are not made in the first cycle."""


def test_warm_ups_compile_what_the_first_cycle_needs(tmp_path: Path) -> None:
    store = WrittenStore(tmp_path / "store")
    for number in range(200):
        store.put("t", number % 3, b"body" * number, tags="TagA" if number % 2 else "")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(store.path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    messages, scanning, warm, after = json.loads(done.stdout)
    assert messages == 200
    assert scanning and warm.keys() > scanning.keys(), "each warm-up compiles its own"
    assert {name: count for name, count in after.items() if name not in INDEX_KERNELS} == warm

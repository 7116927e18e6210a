"""`tiered` commands that kill themselves with SIGKILL at a chosen moment; run by test_kill_maintenance.

Reads commands, {"moment", "words", "output"}, a line of JSON each. Each runs in a process of its own, forked from this
one, so that modules are imported once. Writes the exit code of each, negative for a signal. What a command prints is in
the file ``output``, its errors in ``output``.err.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from rocketmq_tiered.cli import expire, gc, ls, verify
from rocketmq_tiered.cli import main as tiered
from rocketmq_tiered.process import loaded_archive
from tests.faults.killed_child import die
from tiered.formats.keys import parse_catalog_key
from tiered.object_store.interface import Body, ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.wrapper import StoreWrapper

MOMENTS = ("before the commit", "committed", "half deleted")
"""Before the commit the list of pending deletions is written; after gc's commit nothing is deleted yet."""


class DyingStore(StoreWrapper):
    """Dies around a commit, or after half of a deletion."""

    def __init__(self, store: ObjectStore, moment: str) -> None:
        super().__init__(store)
        self._moment = moment

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """As the inner store, if it lives."""
        is_commit = parse_catalog_key("catalog/" + key.rpartition("/catalog/")[2]) is not None
        if is_commit and self._moment == "before the commit":
            die()
        super().put_if_absent(key, body, timeout_s=timeout_s)
        if is_commit and self._moment == "committed":
            die()

    def delete(self, keys: Sequence[str]) -> None:
        """As the inner store, if it lives."""
        if self._moment == "half deleted" and len(keys) > 1:
            super().delete(keys[: len(keys) // 2])
            die()
        super().delete(keys)


IMPORTED = (expire, gc, ls, verify)
INTERNAL = 70


def main() -> None:
    """Run commands until the end of the input."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(moment: str, words: Sequence[str], output: str) -> None:
    """End with the exit code of the command, on a store that dies."""

    def opened(url: str, options: StoreOptions) -> ObjectStore:
        return DyingStore(open_store(url, options), moment)

    code = INTERNAL
    try:
        for number, name in ((1, output), (2, f"{output}.err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        loaded_archive.open_store = opened  # type: ignore[assignment]
        code = tiered(list(words))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()

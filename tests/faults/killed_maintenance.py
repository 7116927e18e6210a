"""A `tiered` command that kills itself with SIGKILL at a chosen moment; run by test_kill_maintenance.

usage: killed_maintenance.py MOMENT COMMAND...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sidecar import archive
from sidecar.cli import main as tiered
from tests.faults.killed_child import die
from tiered.formats.keys import parse_catalog_key
from tiered.object_store.interface import Body, ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.store_options import StoreOptions
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


def main(moment: str, *command: str) -> int:
    """The command, on a store that dies."""

    def opened(url: str, options: StoreOptions) -> ObjectStore:
        return DyingStore(open_store(url, options), moment)

    archive.open_store = opened  # type: ignore[assignment]
    return tiered(list(command))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""A plain directory in the place of an object store server, for tests that run beside either."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from tiered.object_store.interface import StoreOptions


@dataclass(frozen=True)
class StoreDirectory:
    """Answers as a RunningStore does: "buckets" are directories below ``directory``, which need no credentials."""

    directory: Path
    name: str = "file"

    def options(self) -> StoreOptions:
        """Those of a store that has none."""
        return StoreOptions()

    def environment(self) -> dict[str, str]:
        """Nothing: the URL says all."""
        return {}

    def fresh_bucket(self) -> str:
        """A new empty directory as ``file:///…``."""
        return (self.directory / f"t-{uuid.uuid4().hex[:12]}").as_uri()

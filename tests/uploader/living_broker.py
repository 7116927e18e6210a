"""A store whose broker runs, writes and recovers."""

import subprocess
import sys
from pathlib import Path

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tests.uploader.halved_log import HOLD_LOCK
from tiered.broker_store.bound import BrokerOffsets
from tiered.object_store.memory import MemoryStore
from uploader.offload import Offloader, OffloadIdentity


class LivingBroker:
    """Holds the lock of a store and says where its log ends."""

    def __init__(self, store: Path) -> None:
        self.end_phys = 0
        self.answers = True
        self.behind_bytes: int | None = 0
        """Lag of the dispatch; None: not reported."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD_LOCK, str(store / "lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"held\n"

    def offsets(self) -> BrokerOffsets | None:
        if not self.answers:
            return None
        return BrokerOffsets(max_phys=self.end_phys, dispatch_behind_bytes=self.behind_bytes)

    def close(self) -> None:
        self._process.communicate()


def offloader_of(store: object, memory: MemoryStore, broker: LivingBroker) -> Offloader:
    identity = OffloadIdentity(CLUSTER, BROKER, "test", "run")
    return Offloader(
        store,
        memory,
        identity,
        SMALL,
        topic_filter=FILTER,
        offsets_source=broker.offsets,  # type: ignore[arg-type]
    )

"""What one writer of one archive is given: whose archive it is, clock, randomness and log lines, and what it remembers
elsewhere than in the archive. Values only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiered.catalog.state import CatalogState


@dataclass(frozen=True)
class OffloadIdentity:
    """Whose archive, and who writes it."""

    cluster: str
    broker: str
    instance: str
    kind: str
    """"run" or "backfill"."""


@dataclass(frozen=True)
class Environment:
    """Clock, randomness, waits and log lines, injected."""

    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    jitter: Callable[[], float] = random.random
    wait: Callable[[float], object] = time.sleep
    """Between tries of what is not retried in the background; seconds."""
    log: Callable[[str, Mapping[str, object]], None] = lambda message, fields: None
    committed: Callable[[CatalogState], None] = lambda state: None
    """Gets every state this writer has committed messages with; must not block."""
    begun: Callable[[], None] = lambda: None
    """Called when the archive is known to have commits."""
    refuse_empty: Callable[[], None] = lambda: None
    """Called when it has none; raises UnavailableError when it had some."""

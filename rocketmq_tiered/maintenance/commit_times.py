"""When the bucket received commits: bounds for the store times of the runs that they added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NEVER_MS: Final = 1 << 62


@dataclass(frozen=True)
class CommitTimes:
    """The bucket's times of some commits, versions ascending. A version between two has the later one's time; versions
    after the last have none, and their runs stay."""

    versions: Ints
    times_ms: Ints

    def of(self, versions: NDArray[Any]) -> Ints:
        """The time of each version, NEVER_MS if unknown."""
        times = np.append(np.maximum.accumulate(self.times_ms), NEVER_MS)
        found: Ints = times[np.searchsorted(self.versions, versions)]
        return found

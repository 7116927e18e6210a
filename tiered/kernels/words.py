"""Text constants as the little-endian words kernels compare names with."""

from __future__ import annotations

import numpy as np


def word(text: bytes) -> np.uint64:
    """What ``load_le64`` (``load_le32``) reads where ``text`` of at most eight (four) bytes stands."""
    assert len(text) <= 8
    return np.uint64(int.from_bytes(text, "little"))

"""Text constants as the little-endian words kernels compare names with."""

import numpy as np


def word(text: bytes) -> np.uint64:
    """The result of ``load_le64`` (``load_le32``) for ``text`` of at most eight (four) bytes."""
    assert len(text) <= 8
    return np.uint64(int.from_bytes(text, "little"))

"""Reads ranges of local files for a store that has to send them."""

from __future__ import annotations

import os

from tiered.errors import CorruptionError
from tiered.object_store.interface import FileRange


def read_file_range(piece: FileRange) -> bytes:
    """Its bytes. Raises CorruptionError when the file is shorter."""
    descriptor = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.pread(descriptor, piece.length, piece.offset)
        while len(found) < piece.length:
            more = os.pread(descriptor, piece.length - len(found), piece.offset + len(found))
            if not more:
                raise CorruptionError(
                    f"{piece.path} ends at {piece.offset + len(found)}, wanted {piece.length} bytes from {piece.offset}"
                )
            found += more
    finally:
        os.close(descriptor)
    return found

"""Reads the broker's ``checkpoint`` file: flush times and offsets, up to a minute old.

Source: org.apache.rocketmq.store.StoreCheckpoint.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from tiered.residency import open_failure

_FIELDS = struct.Struct(">6q")


@dataclass(frozen=True)
class Checkpoint:
    """Times in ms since the epoch, offsets physical; 0 for fields that this broker version does not write."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0
    master_flushed_phys: int = 0
    confirm_phys: int = 0
    dispatched_phys: int = 0
    """5.5: physical offset of the last dispatched record."""


def read_checkpoint(store_path: Path) -> Checkpoint | None:
    """The store's checkpoint; None when missing (a fresh store) or too short."""
    path = store_path / "checkpoint"
    try:
        with path.open("rb") as file:
            data = file.read(_FIELDS.size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise open_failure(path, error) from error
    return Checkpoint(*_FIELDS.unpack(data)) if len(data) == _FIELDS.size else None

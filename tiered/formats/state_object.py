"""A state object: one of the broker's tables as a JSON document in a container."""

from __future__ import annotations

from typing import Any

from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.memory_bound import LARGE

STATE_KIND = b"RMQTSTAT"


def encode_state(name: str, document: Any) -> bytes:
    """The object that holds the table ``name``."""
    return encode_container(STATE_KIND, {"name": name, "document": document}, {})


def decode_state(data: bytes, name: str, *, source: str) -> Any:
    """The table ``name`` from its object. Raises CorruptionError, also for another table, or UnsupportedFormatError."""
    header = decode_container(data, STATE_KIND, source=source, allowance=LARGE).header
    if header.get("name") != name or "document" not in header:
        raise CorruptionError(f"{source}: holds the table {header.get('name')}, not {name}")
    return header["document"]

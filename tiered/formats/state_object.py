"""A state object: one of the broker's tables as a JSON document in a container."""

from typing import Any

from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.memory_bound import LARGE

STATE_KIND = b"RMQTSTAT"


def encode_state(name: str, document: Any) -> bytes:
    """The object that holds the table ``name``."""
    return encode_container(STATE_KIND, {"name": name, "document": document}, {})


def decode_state(data: bytes, name: str, *, source: str) -> Any:
    """The document that the object with the broker's table ``name`` holds. ``source`` names the object in messages.
    Raises CorruptionError if it is damaged or has another table, and UnsupportedFormatError."""
    header = decode_container(data, STATE_KIND, source=source, allowance=LARGE).header
    if header.get("name") != name or "document" not in header:
        raise CorruptionError(
            f"{source} is damaged: it holds the broker's table {header.get('name')} instead of {name}"
        )
    return header["document"]

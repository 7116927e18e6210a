"""Bounds what is read of a response of an S3 server, by its headers where they give its length."""

from __future__ import annotations

from typing import Any

from tiered.errors import CorruptionError, TieredError
from tiered.object_store.interface import too_large

PIECE_BYTES = 1024 * 1024
"""Read at once from a response without a length."""


class ResponseLimit:
    """At most ``max_bytes`` of the object or, with ``is_range``, of the range ``where``."""

    def __init__(self, max_bytes: int, where: str, *, is_range: bool) -> None:
        self._max_bytes = max_bytes
        self._where = where
        self._is_range = is_range
        self._read_bytes = 0

    def refusal(self, response: dict[str, Any]) -> TieredError | None:
        """The error for a response whose headers announce too much."""
        length = response.get("ContentLength")
        return self._too_long(length) if length is not None and length > self._max_bytes else None

    def is_bounded(self, response: dict[str, Any]) -> bool:
        """Whether the response ends after its ``Content-Length``, which a chunked one ignores."""
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return response.get("ContentLength") is not None and "transfer-encoding" not in headers

    def taken(self, piece: bytes) -> bytes:
        """``piece``, once it is read. Raises when it is too much."""
        self._read_bytes += len(piece)
        if self._read_bytes > self._max_bytes:
            raise self._too_long(self._read_bytes)
        return piece

    def _too_long(self, byte_count: int) -> TieredError:
        if not self._is_range:
            return too_large(byte_count, self._max_bytes, self._where)
        return CorruptionError(f"{self._where}: {self._max_bytes} bytes requested, {byte_count} or more sent")

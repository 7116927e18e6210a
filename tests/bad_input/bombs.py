"""Small objects with valid checksums that claim, or expand to, more memory than any real one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import fastcrc
import numpy as np
import zstandard

from tiered.archive.index.layout import FOOTER_KIND as INDEX_KIND
from tiered.catalog.commit import COMMIT_KIND, decode_commit
from tiered.catalog.deletions import LIST_KIND, DeletionList, Reason, decode_list
from tiered.catalog.pages import PAGE_KIND, decode_page
from tiered.catalog.snapshot import ROOT_KIND, decode_root
from tiered.formats.container import HEADER, decode_container
from tiered.formats.segment_layout import FOOTER_KIND
from tiered.formats.state_object import STATE_KIND, decode_state

SOURCE = "an/object"
_LISTED = DeletionList(SOURCE, Reason.EXPIRED, 3, 1, 0, 0, 0)
DECODERS: Mapping[bytes, Callable[[bytes], Any]] = {
    COMMIT_KIND: lambda data: decode_commit(data, source=SOURCE),
    PAGE_KIND: lambda data: decode_page(data, source=SOURCE),
    ROOT_KIND: lambda data: decode_root(data, source=SOURCE),
    LIST_KIND: lambda data: decode_list(data, _LISTED, source=SOURCE),
    STATE_KIND: lambda data: decode_state(data, "topics", source=SOURCE),
    FOOTER_KIND: lambda data: decode_container(data, FOOTER_KIND, source=SOURCE),
    INDEX_KIND: lambda data: decode_container(data, INDEX_KIND, source=SOURCE),
}


def compressed(payload: bytes) -> bytes:
    """One zstd frame, of a level that is quick."""
    return zstandard.ZstdCompressor(level=1).compress(payload)


def sealed(kind: bytes, stored: bytes) -> bytes:
    """A container around any compressed payload, with right checksums."""
    raw_bytes, crc = zstandard.frame_content_size(stored), fastcrc.crc32.iscsi(stored)
    fields = HEADER.pack(kind, 1, 1, 1, raw_bytes, len(stored), crc, 0)[:-4]
    return fields + fastcrc.crc32.iscsi(fields).to_bytes(4, "little") + stored


def table(name: str, columns: list[tuple[str, str]], rows: int, content: bytes | None = None) -> bytes:
    """A table of zeros. ``rows`` is what it claims."""
    described = json.dumps(columns).encode()
    width = np.dtype(columns).itemsize
    head = struct.pack("<H", len(name)) + name.encode() + struct.pack("<H", len(described)) + described
    return head + struct.pack("<Q", rows) + (bytes(rows * width) if content is None else content)


def payload(header: bytes, *tables: bytes) -> bytes:
    """Of a container."""
    return struct.pack("<I", len(header)) + header + struct.pack("<I", len(tables)) + b"".join(tables)


def nested(piece: bytes, count: int, wrap: tuple[bytes, bytes] = (b'{"topics":[', b"0]}")) -> bytes:
    """A JSON object with ``piece`` many times."""
    return wrap[0] + piece * count + wrap[1]


QUEUES = [("topic", "<u4"), ("queue_id", "<i4"), ("generation", "<u4")]
BOMBS: Mapping[str, Callable[[], bytes]] = {
    "lists": lambda: payload(nested(b"[],", 1_700_000)),
    "objects": lambda: payload(nested(b'{"a":0},', 700_000)),
    "numbers": lambda: payload(nested(b"257,", 3_400_000)),
    "zeros": lambda: payload(b"{}", table("x", [("x", "<i8")], 20_000_000)),
    "queues": lambda: payload(b'{"topics":["t"]}', table("queues", QUEUES, 3_000_000)),
    "a narrow table": lambda: payload(
        b'{"topics":["t"],"document":{},"name":"topics"}',
        *(table(name, [("rows", "u1")], 8_000_000) for name in ("queues", "runs", "objects")),
    ),
    "a table without columns": lambda: payload(b"{}", table("runs", [], 1 << 40)),
    "columns without bytes": lambda: payload(b"{}", table("runs", [("rows", "S0")], 1 << 40)),
    "objects in a table": lambda: payload(b"{}", table("runs", [("rows", "O")], 1 << 20)),
    "rows": lambda: payload(b"{}", table("runs", [("rows", "<i8")], 1 << 60, b"")),
    "tables": lambda: payload(b"{}", *(table(f"{i:05}", [("a", "u1")], 0) for i in range(60_000))),
    "depth": lambda: payload(b"[" * 1_000_000),
}

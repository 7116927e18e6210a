"""Decodes the head of a run group: its tables, which must agree with each other and with the directory. No I/O."""

from __future__ import annotations

from typing import Any, NamedTuple

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.errors import CorruptionError
from tiered.formats.container import decode_container
from tiered.formats.segment_directory import group_table
from tiered.formats.segment_layout import (
    BLOCK_DTYPE,
    BLOCK_RAW_BYTES_MAX,
    CODEC_RAW,
    CODEC_ZSTD,
    GROUP_KIND,
    PAGE_DTYPE,
    PAGE_ROWS,
    RECORD_BYTES_MAX,
    SEGMENT_RUN_DTYPE,
)
from tiered.kernels.columns import LENGTHS_BYTES, STREAMS, VARINT_BYTES_MAX
from tiered.model.tables import QUEUE_DTYPE, RunKind, Table

_PAGE_ROW_BYTES_MIN = 4


class GroupHead(NamedTuple):
    """What a head says. ``runs`` index ``queues``, which index ``topics``."""

    topics: list[str]
    queues: Table
    runs: Table
    blocks: Table
    pages: Table


def decode_head(stored: memoryview, group: np.void, where: str) -> GroupHead:
    """One head, which must be as the directory says. Raises CorruptionError, UnsupportedFormatError, or KeyError
    and the like for columns that are missing."""
    if len(stored) != int(group["head_bytes"]) or fastcrc.crc32.iscsi(stored) != int(group["crc32c"]):
        raise CorruptionError(f"{where} fails its CRC32C")
    container = decode_container(stored, GROUP_KIND, source=where)
    container.charge_queues()
    topics = list(map(str, container.header["topics"]))
    queues = group_table(container, "queues", QUEUE_DTYPE)
    runs = group_table(container, "runs", SEGMENT_RUN_DTYPE)
    blocks = group_table(container, "blocks", BLOCK_DTYPE)
    pages = group_table(container, "pages", PAGE_DTYPE)
    is_lmq, rows = runs["kind"] == RunKind.LMQ, runs["rows"]
    page_rows = pages["rows"].astype(np.int64)
    page_raw_min = page_rows * _PAGE_ROW_BYTES_MIN + LENGTHS_BYTES
    page_raw_max = page_rows * STREAMS * VARINT_BYTES_MAX + LENGTHS_BYTES
    impossible_page = (pages["raw_bytes"] > page_raw_max) | (pages["raw_bytes"] < page_raw_min)
    raw_max = np.where(blocks["rows"] > 1, BLOCK_RAW_BYTES_MAX, RECORD_BYTES_MAX)
    large = blocks["raw_bytes"] > raw_max

    def differs(name: str, column: NDArray[Any]) -> bool:
        return int(column.sum(dtype=np.int64)) != int(group[name])

    says = {
        "number of runs": len(runs) != int(group["runs"]) or len(runs) == 0,
        "rows of runs": bool(((rows < 1) | (rows > int(group["rows"]))).any()) or differs("rows", rows),
        "unknown run kind": bool((runs["kind"] > max(RunKind)).any()),
        "topic index": int(queues["topic"].max(initial=0)) >= len(topics),
        "queue index": int(runs["queue"].max(initial=0)) >= len(queues),
        "block count": differs("blocks", runs["blocks"]) or len(blocks) != int(group["blocks"]),
        "bytes of LMQs": bool((is_lmq & ((runs["byte_count"] != 0) | (runs["blocks"] != 0))).any()),
        "bytes of runs": bool((~is_lmq & (runs["byte_count"] < 1)).any())
        or bool((runs["byte_count"] > int(group["raw_bytes"])).any())
        or differs("raw_bytes", runs["byte_count"]),
        "first rows": bool(runs["first_row"].any()),
        "rows of blocks": differs("block_rows", blocks["rows"])
        or differs("block_rows", np.where(is_lmq, 0, rows)),
        "bytes of blocks": differs("raw_bytes", blocks["raw_bytes"]),
        "length of blocks": differs("block_bytes", blocks["stored_bytes"]),
        "codecs": bool((blocks["codec"] > CODEC_ZSTD).any() or (pages["codec"] > CODEC_ZSTD).any()),
        "stored raw": _raw_differs(blocks) or _raw_differs(pages),
        "block sizes": bool(large.any() or (blocks["rows"] < 1).any() or (blocks["raw_bytes"] < 1).any()),
        "page sizes": bool((impossible_page | (page_rows < 1) | (page_rows > PAGE_ROWS)).any()),
        "stored sizes": bool((blocks["stored_bytes"] < 1).any() or (pages["stored_bytes"] < 1).any()),
        "page rows": differs("rows", page_rows) or len(pages) != int(group["pages"]),
        "length of pages": differs("page_bytes", pages["stored_bytes"]),
    }
    wrong = [name for name, is_wrong in says.items() if is_wrong]
    if wrong:
        raise CorruptionError(f"{where} is impossible: {', '.join(wrong)}")
    return GroupHead(topics, queues, runs, blocks, pages)


def _raw_differs(table: Table) -> bool:
    is_raw = table["codec"] == CODEC_RAW
    return bool((table["raw_bytes"][is_raw] != table["stored_bytes"][is_raw]).any())

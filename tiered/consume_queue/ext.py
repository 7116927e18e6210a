"""Resolves tags codes that the broker moved to consumequeue_ext.

An address is a number below -2^31 in place of tagsCode: file offset + Long.MIN_VALUE. A unit there is {size 2,
tagsCode 8, storeTime 8, bitmap length 2, bitmap}. The broker treats these files as disposable: an address without a
unit stays as it is. Source: org.apache.rocketmq.store.ConsumeQueueExt.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from pathlib import Path
from typing import Final

import numpy as np

from tiered.consume_queue.unit_files import OpenFiles
from tiered.errors import NotFoundError
from tiered.model.tables import Table
from tiered.residency import NAME_DIGITS, open_failure

ADDRESS_MAX: Final = -(2**31) - 1
LONG_MIN: Final = -(2**63)
_HEAD = struct.Struct(">hq")
_UNIT_BYTES_MIN: Final = 20


def resolve_tags_codes(tags_codes: Table, directory: Path, open_files: OpenFiles) -> Table:
    """``tags_codes`` (i8) of one queue with addresses resolved in ``directory``."""
    addressed = np.flatnonzero(tags_codes <= ADDRESS_MAX)
    if len(addressed) == 0:
        return tags_codes
    files = _files(directory)
    if not files:
        return tags_codes
    resolved = tags_codes.copy()
    begins = [begin for begin, _ in files]
    for i in addressed.tolist():
        offset = int(tags_codes[i]) - LONG_MIN
        at = bisect_right(begins, offset) - 1
        if at >= 0 and (code := _read_code(open_files, files[at][1], offset - begins[at])) is not None:
            resolved[i] = code
    return resolved


def _files(directory: Path) -> list[tuple[int, Path]]:
    try:
        names = [n for n in os.listdir(directory) if len(n) == NAME_DIGITS and n.isdecimal()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise open_failure(directory, error) from error
    return sorted((int(name), directory / name) for name in names)


def _read_code(open_files: OpenFiles, path: Path, offset: int) -> int | None:
    head = bytearray(_HEAD.size)
    try:
        got = open_files.get(path).read_into(memoryview(head), offset)
    except NotFoundError:
        return None
    if got < _HEAD.size:
        return None
    size, code = _HEAD.unpack(head)
    return int(code) if size >= _UNIT_BYTES_MIN else None

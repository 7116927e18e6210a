"""Finds the next valid record after a damaged one, and how far records are proven.

The next record is the first position above the damage whose header contains that position and whose lengths and
checksums match. Where consume queues are visible, it or a record that an unbroken chain leads to must be in one: bytes
alone may remain from earlier use of the file.

Validity: org.apache.rocketmq.store.CommitLog.checkMessageAndReturnSize.
"""

import contextlib
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final

from tiered.broker_store.commit_log import RECORD_MAGICS, CommitLog, LogFile
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.errors import AccessDeniedError, CorruptionError, UnreadableError
from tiered.formats.record import RECORD_BYTES_MIN

SEARCH_BYTES: Final = 4 * 1024 * 1024
"""Bytes of the log that are searched for a record at a time."""
CHAIN_RECORDS_MAX: Final = 256
"""So many records that follow one another are looked up in the consume queues at most."""
TORN_QUEUES_MAX: Final = 64
"""Of so many queues whose last record is lost, earlier units are checked."""
TORN_UNITS: Final = 16
"""Units of a queue that one step checks."""
HEADER_BYTES: Final = 40
QUEUE_OFFSET_MAX: Final = ((1 << 63) - 1) // 20
"""The broker counts consume queue bytes, 20 per unit, in a long."""
_UNIT_PLACE: Final = ("phys", "size", "queue_offset")
_MAGIC_PREFIX: Final = b"\xda\xa3\x20"
_HEADER = struct.Struct(">iIiiiqqi")
CRC_MASK: Final = 0x7FFFFFFF
_RECORD_CRC = re.compile(rb"__CRC32#\x01(\d{10})\x02\Z")
_RECORD_CRC_BYTES: Final = 20
_BORN_HOST_V6: Final = 0x10
_STORE_HOST_V6: Final = 0x20


def find_next_record(
    log: CommitLog, damaged_phys: int, limit_phys: int, *, index: ConsumeQueueIndex | None = None
) -> int | None:
    """Physical offset of the first valid record after the damaged one at ``damaged_phys`` that ends at or below
    ``limit_phys``; None if there is none.

    If the consume queues are known (``index``), one of them has to have a unit of it, or of a record that follows it
    without a gap: bytes alone may remain from an earlier use of the file. Raises what reading the log raises.
    """
    for phys in _header_candidates(log, damaged_phys + 1, limit_phys):
        size = record_size(log, phys)
        is_whole = size is not None and phys + size <= limit_phys
        if is_whole and (index is None or _is_in_queues(log, index, phys, limit_phys)):
            return phys
    return None


def find_cut_record(log: CommitLog, damaged_phys: int, limit_phys: int) -> int | None:
    """Physical offset of the first record after the damaged one at ``damaged_phys`` that begins below ``limit_phys``
    and ends above it, so that its rest may not be written yet: only its header is checked. None if there is none.
    Raises what reading the log raises."""
    for phys in _header_candidates(log, damaged_phys + 1, limit_phys):
        size, file = log.record_size_at(phys), log.file_at(phys)
        if size is not None and file is not None and limit_phys - phys < size <= file.end_phys - phys:
            return phys
    return None


def record_size(log: CommitLog, phys: int) -> int | None:
    """Size in bytes of the record at physical offset ``phys`` if it is complete and all its checks hold; None if
    not."""
    size = log.record_size_at(phys)
    file = log.file_at(phys)
    if size is None or file is None or not RECORD_BYTES_MIN <= size <= file.end_phys - phys:
        return None
    data = log.read(phys, size)
    return size if len(data) == size and is_record(data, phys) else None


def accepted_size(log: CommitLog, phys: int, *, index: ConsumeQueueIndex | None) -> int | None:
    """Size in bytes of the record at physical offset ``phys`` if everything but the checksum in its property
    ``__CRC32#`` is valid, and the broker accepted it; None if the record counts as damaged.

    A broker that does not append such checksums keeps the one of a copied message, which is then wrong. So the record
    is not damaged if a consume queue (``index``) has a unit of it and the next record has no valid checksum: a broker
    that appends checksums replaces the copied one (CommitLog.asyncPutMessage)."""
    size = stored_size(log, phys)
    if index is None or size is None:
        return None
    following = log.record_size_at(phys + size)
    if following is not None:
        data = log.read(phys + size, following)
        if _RECORD_CRC.search(data, len(data) - _RECORD_CRC_BYTES) and is_record(data, phys + size):
            return None
    named = index.units_between(phys, phys + 1).values()
    return size if any((units["size"] == size).any() for units in named) else None


def stored_size(log: CommitLog, phys: int) -> int | None:
    """Size in bytes of the record at ``phys`` if everything except its ``__CRC32#`` is valid, else None."""
    size = log.record_size_at(phys)
    return size if size is not None and _is_stored(log.read(phys, size), phys) else None


def do_lengths_add_up(log: CommitLog, phys: int, size: int) -> bool:
    """Whether the lengths of body, topic and properties of the record at physical offset ``phys`` add up to its
    ``size``. Only the bytes with these lengths are read. Bytes that are not written yet do not add up."""
    head = log.read(phys, HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        return False
    magic, sys_flag = _HEADER.unpack(head)[1::6]
    return _body_span(lambda at, count: log.read(phys + at, count), magic, sys_flag, size) is not None


def _body_span(
    read: Callable[[int, int], bytes], magic: int, sys_flag: int, size: int
) -> tuple[int, int] | None:
    """Begin and end of the body inside a record, if the lengths of its parts add up to ``size``; else None. ``read``
    returns up to a number of bytes at a position of the record; ``magic`` and ``sys_flag``, of its header, decide how
    long some parts are."""

    def length_at(at: int, length_bytes: int) -> int | None:
        data = read(at, length_bytes)
        return int.from_bytes(data, "big") if len(data) == length_bytes else None

    born = 20 if sys_flag & _BORN_HOST_V6 else 8
    store = 20 if sys_flag & _STORE_HOST_V6 else 8
    body_at = HEADER_BYTES + 8 + born + 8 + store + 4 + 8 + 4
    body_bytes = length_at(body_at - 4, 4)
    if body_bytes is None or body_at + body_bytes >= size:  # negative lengths are larger than any record
        return None
    topic_at = body_at + body_bytes
    topic_length_bytes = 1 if magic == RECORD_MAGICS[0] else 2
    topic_bytes = length_at(topic_at, topic_length_bytes)
    if topic_bytes is None:
        return None
    properties_at = topic_at + topic_length_bytes + topic_bytes
    properties_bytes = length_at(properties_at, 2)
    if properties_bytes is None or properties_at + 2 + properties_bytes != size:
        return None
    return body_at, topic_at


def is_record(data: bytes, phys: int) -> bool:
    """Whether ``data`` is exactly one record stored at ``phys``: magic, size, position, lengths, checksums."""
    return _is_stored(data, phys) and _is_record_crc_right(data)


def _is_stored(data: bytes, phys: int) -> bool:
    """Whether ``data`` is exactly one record stored at ``phys``, by magic, size, position, lengths and the body's
    checksum. The record's own checksum is not checked: it may be of an earlier copy of the message."""
    if len(data) < RECORD_BYTES_MIN:
        return False
    size, magic, body_crc, _, _, queue_offset, stored_phys, sys_flag = _HEADER.unpack_from(data)
    if size != len(data) or magic not in RECORD_MAGICS or stored_phys != phys:
        return False
    if not 0 <= queue_offset <= QUEUE_OFFSET_MAX:
        return False
    span = _body_span(lambda at, count: data[at : at + count], magic, sys_flag, size)
    if span is None:
        return False
    body = data[slice(*span)]
    return not body or zlib.crc32(body) & CRC_MASK == body_crc


def _is_record_crc_right(data: bytes) -> bool:
    """Whether the record's own checksum, its last property if the broker appends one, is valid."""
    match = _RECORD_CRC.search(data, len(data) - _RECORD_CRC_BYTES)
    if match is None:
        return True
    stored = int(match[1][::-1])  # least significant digit first
    return zlib.crc32(data[:-_RECORD_CRC_BYTES]) & CRC_MASK == stored


def proven_phys(log: CommitLog, index: ConsumeQueueIndex) -> int:
    """How far a broker that does not run has certainly written its log: about the physical end of the last record that
    is complete in the log and has a unit in a consume queue; 0 if there is none. Where the log has no valid record
    below it, it is damaged; above it, the log may end.

    The last units of queues may be of records that were lost with the end of the log: then earlier units are checked,
    of a limited number of queues."""
    proven, torn = 0, list[tuple[str, int]]()
    lasts = sorted(((*record, queue) for queue, record in index.last_records().items()), reverse=True)
    for phys, size, queue in lasts:
        if record_size(log, phys) == size:
            proven = phys + size
            break
        torn.append(queue)
    for queue in torn[:TORN_QUEUES_MAX]:
        with contextlib.suppress(UnreadableError, AccessDeniedError, CorruptionError):
            proven = _last_whole(log, index, queue, proven)
    return proven


def _last_whole(log: CommitLog, index: ConsumeQueueIndex, queue: tuple[str, int], proven: int) -> int:
    """Physical end of the last complete record of ``queue`` above ``proven``, approximately; ``proven`` if it has none.

    The last unit whose record is complete is searched backward from the queue's end in steps that double, then by
    bisection. Each step checks several units, so that single damaged records do not mislead it.
    """
    first, lost_from, step = index.min_offset(*queue), index.max_offset(*queue), 1
    whole_to, is_found = first - 1, False  # the last queue offset known to have its record
    while lost_from - whole_to > 1:
        offset = (whole_to + lost_from) // 2 if is_found else max(lost_from - step, first)
        units = index.units(*queue, offset, TORN_UNITS)
        newest_first = units[units["queue_offset"] < lost_from][::-1]
        for phys, size, base in zip(*(newest_first[name].tolist() for name in _UNIT_PLACE), strict=True):
            if phys + size <= proven or record_size(log, phys) == size:
                proven, whole_to, is_found = max(proven, phys + size), max(offset, base), True
                break
        else:
            lost_from, step = offset, 2 * step
    return proven


def _header_candidates(log: CommitLog, begin: int, limit: int) -> Iterator[int]:
    """The physical offsets in [begin, limit) at which a record may begin, file by file: where bytes that look like a
    record's header contain that offset."""
    for file in log.files:
        if file.end_phys > begin and file.begin_phys < limit:
            yield from _candidates_in_file(log, file, max(begin, file.begin_phys), min(limit, file.end_phys))


def _candidates_in_file(log: CommitLog, file: LogFile, begin: int, end: int) -> Iterator[int]:
    """The physical offsets in [begin, end) of one ``file`` at which a record may begin: the bytes there have a record's
    magic, and their PHYSICALOFFSET is where they are. Raises UnreadableError at bytes that the disk cannot read."""
    while begin < end:
        buffer = memoryview(bytearray(min(SEARCH_BYTES + HEADER_BYTES, file.end_phys - begin)))
        got, failure = log.read_readable_part(buffer, begin)
        data = bytes(buffer[:got])
        if len(data) < HEADER_BYTES and failure is None:
            return
        at = data.find(_MAGIC_PREFIX, 4)
        while at >= 0 and at - 4 < min(SEARCH_BYTES, end - begin) and at - 4 + HEADER_BYTES <= len(data):
            if int.from_bytes(data[at + 24 : at + 32], "big") == begin + at - 4:
                yield begin + at - 4
            at = data.find(_MAGIC_PREFIX, at + 1)
        if failure is not None:
            raise failure  # bytes before it were searched
        begin += SEARCH_BYTES


def _is_in_queues(log: CommitLog, index: ConsumeQueueIndex, phys: int, limit: int) -> bool:
    """Whether the consume queues confirm the record at ``phys``: one has a unit of it, or of one of the records that
    follow it without a gap below ``limit``. If no unit lies in that range, a second valid record confirms it."""
    chain = [phys]
    with contextlib.suppress(UnreadableError):  # the chain ends at an unreadable place
        while len(chain) < CHAIN_RECORDS_MAX and (size := record_size(log, chain[-1])) is not None:
            if chain[-1] + size >= limit:
                break
            chain.append(chain[-1] + size)
    units_of_queues = index.units_between(phys, chain[-1] + 1)
    if not units_of_queues:
        # No record of this range is in a queue (deleted topics, half messages): the bytes decide.
        return len(chain) > 1
    positions = {int(unit) for units in units_of_queues.values() for unit in units["phys"]}
    return not positions.isdisjoint(chain)

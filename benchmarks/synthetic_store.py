"""Writes a broker's store directory without a broker: for benchmarks, 10 GiB inputs and soak runs.

Owns the record layout it writes (V1, IPv4, as org.apache.rocketmq.store.MessageExtEncoder lays it out), the
roll of commitlog files, the consume queues, ``config/topics.json`` and ``checkpoint``; the directory is what
a broker leaves after a clean stop. Message ``index`` goes to queue ``index % queues`` at offset
``index // queues``; the same spec gives the same bytes. An optional ``__CRC32#`` property covers each record.
Does not own the text of bodies.
"""

import argparse
import json
import os
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.json_bodies import BODY_BYTES_MIN, JsonBodies, decimal_digits, hex_digits

MAGIC_V1 = 0xDAA320A7
BLANK_MAGIC = 0xCBD43194
BLANK_BYTES = 8
CONSUME_QUEUE_FILE_UNITS = 300_000
TAGS = ("TagA", "TagB", "TagC", "TagD")
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
BATCH_BYTES = 16 * 1024 * 1024
"""Log bytes built in memory at once."""

HEAD_DTYPE = np.dtype(
    [
        ("total_size", ">i4"),
        ("magic", ">u4"),
        ("body_crc", ">u4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("physical_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_timestamp", ">i8"),
        ("born_host", "u1", (8,)),
        ("store_timestamp", ">i8"),
        ("store_host", "u1", (8,)),
        ("reconsume_times", ">i4"),
        ("prepared_transaction_offset", ">i8"),
        ("body_length", ">i4"),
    ]
)
UNIT_DTYPE = np.dtype([("phys", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])

_CRC_PROPERTY_BYTES = 20


@dataclass(frozen=True)
class StoreSpec:
    """What a synthetic store holds. Sizes in bytes; ``messages_per_ms`` paces the store timestamps."""

    topics: int
    queues_per_topic: int
    body_bytes: int
    seed: int = 1
    body_jitter: float = 0.0
    """Bodies are ``body_bytes`` ± this fraction."""
    record_crc: bool = False
    file_bytes: int = 1 << 30
    start_ms: int = 1_700_000_000_000
    messages_per_ms: int = 20
    cluster: str = "BenchCluster"
    broker: str = "bench-a"

    def __post_init__(self) -> None:
        if self.body_bytes * (1 - self.body_jitter) < BODY_BYTES_MIN:
            raise ValueError(f"bodies must have {BODY_BYTES_MIN} bytes or more")
        if not 0 < self.topics <= 10_000 or self.queues_per_topic < 1:
            raise ValueError("1 to 10,000 topics of one queue or more")

    @property
    def queues(self) -> int:
        """All queues of all topics."""
        return self.topics * self.queues_per_topic

    @property
    def record_bytes(self) -> int:
        """Bytes of a record with a body of ``body_bytes``."""
        return self.body_bytes + HEAD_DTYPE.itemsize + _tail_dtype(self).itemsize


@dataclass
class StoreTotals:
    """What was written so far."""

    messages: int = 0
    end_phys: int = 0
    last_store_timestamp_ms: int = 0


@dataclass
class _PendingRows:
    """Rows written to the log and not yet to the consume queues, one array per batch."""

    first_index: list[int] = field(default_factory=list)
    units: list[NDArray[np.void]] = field(default_factory=list)


def topic_name(topic: int) -> str:
    """``Bench0000`` …: names of equal length, so that records differ in size by their bodies alone."""
    return f"Bench{topic:04d}"


def java_hash(text: str) -> int:
    """``String.hashCode`` of ASCII text, as the signed 32-bit number a consume queue holds as tagsCode."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


class StoreWriter:
    """Appends messages to a store directory. After ``flush()`` consume queues reach what the log holds."""

    def __init__(self, directory: Path, spec: StoreSpec) -> None:
        self.directory, self.spec, self.totals = directory, spec, StoreTotals()
        self._bodies = JsonBodies(spec.seed)
        self._pending = _PendingRows()
        self._log_file: int | None = None
        self._tag_codes = np.array([java_hash(tag) for tag in TAGS], np.int64)
        self._topics = [topic_name(topic) for topic in range(spec.topics)]
        (directory / "commitlog").mkdir(parents=True)
        _write_configuration(directory, spec, self._topics)

    def append(self, count: int) -> None:
        """Write ``count`` more messages to the commitlog."""
        batch_rows = max(1, BATCH_BYTES // self.spec.record_bytes)
        left = count
        while left > 0:
            left -= self._append_batch(min(left, batch_rows))

    def flush(self) -> None:
        """Write the consume-queue units of everything appended, then the checkpoint."""
        if self._pending.units:
            indices = np.concatenate(
                [
                    np.arange(first, first + len(units))
                    for first, units in zip(self._pending.first_index, self._pending.units, strict=True)
                ]
            )
            units = np.concatenate(self._pending.units, dtype=UNIT_DTYPE)  # keeps the byte order
            self._write_consume_queues(indices, units)
            self._pending = _PendingRows()
        timestamps = struct.pack(">3q", *[self.totals.last_store_timestamp_ms] * 3)
        (self.directory / "checkpoint").write_bytes(timestamps.ljust(4096, b"\0"))

    def close(self) -> None:
        """Flush and leave the directory as a cleanly stopped broker would."""
        self.flush()
        if self._log_file is not None:
            os.close(self._log_file)
            self._log_file = None

    def _append_batch(self, rows: int) -> int:
        """Write up to ``rows`` messages into the current file; fewer when the file ends before."""
        first = self.totals.messages
        indices = np.arange(first, first + rows, dtype=np.int64)
        body_sizes = self._body_sizes(indices)
        sizes = body_sizes + HEAD_DTYPE.itemsize + _tail_dtype(self.spec).itemsize
        file_begin = self.totals.end_phys // self.spec.file_bytes * self.spec.file_bytes
        ends = self.totals.end_phys + np.cumsum(sizes)
        fitting = int(np.searchsorted(ends, file_begin + self.spec.file_bytes - BLANK_BYTES, "right"))
        if fitting:
            self._write_records(indices[:fitting], body_sizes[:fitting], sizes[:fitting], ends[:fitting])
        if fitting < rows:
            self._end_file(file_begin)
        return fitting

    def _body_sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        spread = int(self.spec.body_bytes * self.spec.body_jitter)
        if not spread:
            return np.full(len(indices), self.spec.body_bytes, np.int64)
        scattered = (indices * 2_654_435_761 + self.spec.seed) % (2 * spread + 1)
        return self.spec.body_bytes - spread + scattered

    def _write_records(
        self,
        indices: NDArray[np.int64],
        body_sizes: NDArray[np.int64],
        sizes: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        bodies = self._bodies.bodies(int(indices[0]), body_sizes)
        timestamps = self.spec.start_ms + indices // self.spec.messages_per_ms
        heads = self._heads(indices, bodies, sizes, ends - sizes, timestamps)
        tags = _tags_of(indices)
        tails = self._tails(indices, tags)
        log = _join_records(heads, bodies, tails, record_crc=self.spec.record_crc)
        _write_fully(self._open_log(), log)
        units = np.empty(len(indices), UNIT_DTYPE)
        units["phys"], units["size"], units["tags_code"] = ends - sizes, sizes, self._tag_codes[tags]
        self._pending.first_index.append(int(indices[0]))
        self._pending.units.append(units)
        self.totals = StoreTotals(int(indices[-1]) + 1, int(ends[-1]), int(timestamps[-1]))

    def _heads(
        self,
        indices: NDArray[np.int64],
        bodies: list[bytes],
        sizes: NDArray[np.int64],
        positions: NDArray[np.int64],
        timestamps: NDArray[np.int64],
    ) -> NDArray[np.void]:
        heads = np.zeros(len(indices), HEAD_DTYPE)
        heads["total_size"], heads["magic"] = sizes, MAGIC_V1
        heads["body_crc"] = np.fromiter(map(zlib.crc32, bodies), np.uint32, len(bodies)) & 0x7FFFFFFF
        heads["queue_id"] = indices % self.spec.queues % self.spec.queues_per_topic
        heads["queue_offset"] = indices // self.spec.queues
        heads["physical_offset"] = positions
        heads["born_timestamp"], heads["store_timestamp"] = timestamps - 1, timestamps
        heads["born_host"] = heads["store_host"] = np.frombuffer(HOST, np.uint8)
        heads["body_length"] = np.fromiter(map(len, bodies), np.int32, len(bodies))
        return heads

    def _tails(self, indices: NDArray[np.int64], tags: NDArray[np.int64]) -> NDArray[np.void]:
        """Topic and properties of each message: KEYS, UNIQ_KEY, CLUSTER, TAGS (and room for ``__CRC32#``)."""
        dtype = _tail_dtype(self.spec)
        tails = np.zeros(len(indices), dtype)
        text = _text_of(self.spec)
        tails["topic_length"] = dtype["topic"].itemsize
        tails["topic"] = np.frombuffer(b"Bench0000", np.uint8)
        tails["topic"][:, 5:] = decimal_digits(indices % self.spec.queues // self.spec.queues_per_topic, 4)
        tails["properties_length"] = dtype["properties"].itemsize
        properties = tails["properties"]
        properties[:] = np.frombuffer(text, np.uint8)
        key_at, unique_at, tag_at = text.index(b"K0000000000"), text.index(b"7F000001"), text.index(b"TagA")
        properties[:, key_at + 1 : key_at + 11] = decimal_digits(indices, 10)
        digits = hex_digits(indices.astype(np.uint64), 16, b"0123456789ABCDEF")
        properties[:, unique_at + 16 : unique_at + 32] = digits
        properties[:, tag_at + 3] = ord("A") + tags
        return tails

    def _open_log(self) -> int:
        if self._log_file is None:
            begin = self.totals.end_phys // self.spec.file_bytes * self.spec.file_bytes
            path = self.directory / "commitlog" / f"{begin:020d}"
            self._log_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.ftruncate(self._log_file, self.spec.file_bytes)  # a broker preallocates the whole file
        return self._log_file

    def _end_file(self, file_begin: int) -> None:
        room = file_begin + self.spec.file_bytes - self.totals.end_phys
        if room == self.spec.file_bytes:
            raise ValueError("a record is larger than a commitlog file")
        log_file = self._open_log()
        _write_fully(log_file, struct.pack(">iI", room, BLANK_MAGIC))
        os.close(log_file)
        self._log_file = None
        self.totals.end_phys = file_begin + self.spec.file_bytes

    def _write_consume_queues(self, indices: NDArray[np.int64], units: NDArray[np.void]) -> None:
        queue = indices % self.spec.queues
        order = np.argsort(queue, kind="stable")
        bounds = np.searchsorted(queue[order], np.arange(self.spec.queues + 1))
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            rows = order[bounds[number] : bounds[number + 1]]
            topic, queue_id = divmod(number, self.spec.queues_per_topic)
            path = self.directory / "consumequeue" / self._topics[topic] / str(queue_id)
            _write_units(path, int(indices[rows[0]]) // self.spec.queues, units[rows])


def write_store(
    directory: Path, spec: StoreSpec, *, messages: int | None = None, log_bytes: int = 0
) -> StoreTotals:
    """Make a whole store of ``messages``, or of about ``log_bytes``; the directory must not exist."""
    directory.mkdir(parents=True)
    writer = StoreWriter(directory, spec)
    writer.append(messages if messages is not None else log_bytes // spec.record_bytes)
    writer.close()
    return writer.totals


def _tags_of(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return (indices * 2_654_435_761 >> 16) % len(TAGS)


def _text_of(spec: StoreSpec) -> bytes:
    """The properties of every message, with the places that differ filled by stand-ins."""
    values = {
        "KEYS": f"K{0:010d}",
        "UNIQ_KEY": f"7F000001{0:024d}",
        "CLUSTER": spec.cluster,
        "TAGS": TAGS[0],
    }
    if spec.record_crc:
        values["__CRC32#"] = f"{0:010d}"
    return "".join(f"{name}\x01{value}\x02" for name, value in values.items()).encode("ascii")


def _tail_dtype(spec: StoreSpec) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("topic_length", "u1"),
            ("topic", "u1", (len(topic_name(0)),)),
            ("properties_length", ">u2"),
            ("properties", "u1", (len(_text_of(spec)),)),
        ]
    )


def _join_records(
    heads: NDArray[np.void], bodies: list[bytes], tails: NDArray[np.void], *, record_crc: bool
) -> bytes:
    head_bytes, tail_bytes = heads.dtype.itemsize, tails.dtype.itemsize
    all_heads, all_tails = heads.tobytes(), tails.tobytes()
    pieces = [b""] * (3 * len(bodies))
    pieces[0::3] = [all_heads[at : at + head_bytes] for at in range(0, len(all_heads), head_bytes)]
    pieces[1::3] = bodies
    pieces[2::3] = [all_tails[at : at + tail_bytes] for at in range(0, len(all_tails), tail_bytes)]
    if record_crc:
        for at in range(0, len(pieces), 3):
            pieces[at + 2] = _with_record_crc(pieces[at] + pieces[at + 1], pieces[at + 2])
    return b"".join(pieces)


def _with_record_crc(before: bytes, tail: bytes) -> bytes:
    """Ten decimal digits, least significant first (MessageDecoder.createCrc32), over all but the property."""
    covered = tail[:-_CRC_PROPERTY_BYTES]
    crc = zlib.crc32(covered, zlib.crc32(before)) & 0x7FFFFFFF
    return covered + b"__CRC32#\x01" + f"{crc:010d}"[::-1].encode("ascii") + b"\x02"


def _write_fully(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _write_units(directory: Path, first_offset: int, units: NDArray[np.void]) -> None:
    """Units from queue offset ``first_offset`` on, over as many files as they need."""
    directory.mkdir(parents=True, exist_ok=True)
    file_bytes = CONSUME_QUEUE_FILE_UNITS * UNIT_DTYPE.itemsize
    done = 0
    while done < len(units):
        number, row = divmod(first_offset + done, CONSUME_QUEUE_FILE_UNITS)
        part = units[done : done + CONSUME_QUEUE_FILE_UNITS - row]
        file = os.open(directory / f"{number * file_bytes:020d}", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(file, file_bytes)
            os.pwrite(file, part.tobytes(), row * UNIT_DTYPE.itemsize)
        finally:
            os.close(file)
        done += len(part)


def _write_configuration(directory: Path, spec: StoreSpec, topics: list[str]) -> None:
    """What a stopped broker leaves beside its logs; two system topics tell the cluster and the broker."""
    config = directory / "config"
    config.mkdir()
    named = dict.fromkeys(topics, spec.queues_per_topic)
    named |= {f"{spec.cluster}_REPLY_TOPIC": 1, f"rmq_sys_SYNC_BROKER_MEMBER_{spec.broker}": 1}
    version = {"counter": 1, "stateVersion": 0, "timestamp": spec.start_ms}
    table = {
        name: {
            "attributes": {},
            "order": False,
            "perm": 6,
            "readQueueNums": queues,
            "topicFilterType": "SINGLE_TAG",
            "topicName": name,
            "topicSysFlag": 0,
            "writeQueueNums": queues,
        }
        for name, queues in named.items()
    }
    documents = {
        "topics.json": {"dataVersion": version, "topicConfigTable": table},
        "subscriptionGroup.json": {
            "dataVersion": version,
            "forbiddenTable": {},
            "subscriptionGroupTable": {},
        },
        "consumerOffset.json": {"dataVersion": version, "groupTopicMap": {}, "offsetTable": {}},
        "delayOffset.json": {"dataVersion": version, "offsetTable": {}},
    }
    for name, document in documents.items():
        (config / name).write_text(json.dumps(document), "utf-8")
    (directory / "lock").write_text("lock", "ascii")


def main() -> None:
    """Write a store from the command line, e.g. for a soak run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic_store", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="the store directory to make")
    parser.add_argument("--topics", type=int, default=4)
    parser.add_argument("--queues", type=int, default=4, help="queues of each topic")
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--body-jitter", type=float, default=0.0, help="bodies vary by this fraction")
    parser.add_argument("--record-crc", action="store_true", help="add the __CRC32# property")
    parser.add_argument("--file-bytes", type=int, default=1 << 30, help="size of a commitlog file")
    parser.add_argument("--seed", type=int, default=1)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--messages", type=int)
    size.add_argument("--log-gib", type=float)
    options = parser.parse_args()
    spec = StoreSpec(
        topics=options.topics,
        queues_per_topic=options.queues,
        body_bytes=options.body_bytes,
        body_jitter=options.body_jitter,
        record_crc=options.record_crc,
        file_bytes=options.file_bytes,
        seed=options.seed,
    )
    started = time.perf_counter()
    log_bytes = int((options.log_gib or 0) * (1 << 30))
    totals = write_store(options.directory, spec, messages=options.messages, log_bytes=log_bytes)
    took_s = time.perf_counter() - started
    rate = totals.end_phys / 1e6 / took_s
    print(
        f"{totals.messages:,} messages, {totals.end_phys / 1e6:,.0f} MB in {took_s:.1f} s ({rate:,.0f} MB/s)"
    )


if __name__ == "__main__":
    main()

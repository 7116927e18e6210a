"""A record as a broker stored it, for retry messages."""

import struct
import zlib


def original(
    body: bytes = b"hello", topic: bytes = b"t", properties: bytes = b"KEYS\x01k\x02TAGS\x01a\x02"
) -> bytes:
    """A V1 record of an IPv4 host, at physical offset 777."""
    host = bytes([10, 0, 0, 1]) + struct.pack(">i", 10911)
    tail = b"".join(
        (
            host,
            struct.pack(">q", 5),
            host,
            struct.pack(">iqi", 0, 0, len(body)),
            body,
            bytes([len(topic)]),
            topic,
            struct.pack(">h", len(properties)),
            properties,
        )
    )
    return (
        struct.pack(
            ">iIIiiqqiq", 48 + len(tail), 0xDAA320A7, zlib.crc32(body) & 0x7FFFFFFF, 3, 7, 21, 777, 0, 4
        )
        + tail
    )

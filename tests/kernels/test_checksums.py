"""CRC-32, XXH64 and Java hashes of the kernels against zlib, xxhash and the oracle."""

import random
import zlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.guarded_memory import GuardedMemory
from tiered.formats.record import decode_text
from tiered.formats.record import java_hash as java_hash_of_text
from tiered.kernels.checksums import crc32, is_utf8, java_hash, xxh64

MEMORY = GuardedMemory(1 << 17)

JAVA_HASHES = {
    "": 0,
    "TagA": 2598919,
    "Aa": 2112,
    "BB": 2112,
    "TM": 2681,
    "ck": 3176,
    "ack": 96393,
    "TopicTest#MessageKey": 638347386,
}


@pytest.mark.parametrize("length", [*range(150), 255, 256, 257, 1023, 1024, 65_536, 100_003])
def test_crc32_and_xxh64_of_every_short_length(length: int) -> None:
    data = random.Random(length).randbytes(length)
    array = MEMORY.place(data)
    assert crc32(array.ctypes.data, 0, length) == zlib.crc32(data)
    assert int(xxh64(array.ctypes.data, 0, length)) == xxhash.xxh64_intdigest(data)


@given(st.binary(max_size=600), st.integers(0, 40))
def test_crc32_and_xxh64_from_any_position(data: bytes, position: int) -> None:
    position = min(position, len(data))
    array = MEMORY.place(data)
    length = len(data) - position
    assert crc32(array.ctypes.data, position, length) == zlib.crc32(data[position:])
    assert int(xxh64(array.ctypes.data, position, length)) == xxhash.xxh64_intdigest(data[position:])


@pytest.mark.parametrize(("text", "expected"), JAVA_HASHES.items())
def test_java_hash_of_known_texts(text: str, expected: int) -> None:
    array = MEMORY.place(text.encode())
    assert java_hash(array.ctypes.data, 0, len(array)) == expected == java_hash_of_text(text)


@given(st.text(max_size=50))
def test_java_hash_counts_utf16_units(text: str) -> None:
    encoded = text.encode("utf-8", "replace")
    array = MEMORY.place(encoded)
    assert java_hash(array.ctypes.data, 0, len(encoded)) == java_hash_of_text(encoded.decode())


@given(
    st.lists(
        st.sampled_from(
            [0x41, 0x80, 0xBF, 0xC1, 0xC2, 0xE0, 0xA0, 0xED, 0x9F, 0xEF, 0xF0, 0x90, 0xF4, 0x8F, 0xF5]
        )
    )
)
def test_invalid_utf8_hashes_as_java_decodes_it(units: list[int]) -> None:
    encoded = bytes(units)
    array = MEMORY.place(encoded)
    assert java_hash(array.ctypes.data, 0, len(encoded)) == java_hash_of_text(decode_text(encoded))


@pytest.mark.parametrize(
    ("encoded", "hash_in_java"),
    [
        # Made with Java 17: new String(bytes, UTF_8).hashCode()
        (b"\xff", 65533),
        (b"\x61\xc3", 68540),
        (b"\xe2\x82\x41", 2031588),
        (b"\xed\xa0\x80", 65533),
        (b"\xf0\x9f\x98", 65533),
        (b"\xf0\x9f\x98\x80", 1772899),
        (b"\xf5\x80\x80\x80", 2017367872),
        (b"\xc0\x80", 2097056),
        (b"\xe0\x80\x80", 65074269),
        (b"\xed\xa0\x80\xed\xb0\x80", 2097056),
        (b"\xf4\x90\x80\x80", 2017367872),
        (b"\xe2\x28\xa1", 63043986),
        (b"\xf0\x28\x8c\xbc", 1954429099),
        (b"\x61\xf0\x90\x62", 2124838),
        (b"\xe0\xa0", 65533),
        (b"\xf0\x90\x80", 65533),
    ],
)
def test_malformed_bytes_hash_as_in_java(encoded: bytes, hash_in_java: int) -> None:
    assert java_hash(MEMORY.place(encoded).ctypes.data, 0, len(encoded)) == hash_in_java


@given(
    st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace")))
)
def test_is_utf8_agrees_with_python(encoded: bytes) -> None:
    try:
        encoded.decode()
        expected = True
    except UnicodeDecodeError:
        expected = False
    assert bool(is_utf8(MEMORY.place(encoded).ctypes.data, 0, len(encoded))) is expected


def test_kernels_accept_addresses_of_read_only_arrays() -> None:
    assert crc32(np.frombuffer(b"read-only", np.uint8).ctypes.data, 0, 9) == zlib.crc32(b"read-only")

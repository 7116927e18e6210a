"""The envelope of commits, pages and footers: what went in comes out, or a CorruptionError names the source."""

import sys
from typing import Any

import fastcrc
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sweeps import examples
from tiered.errors import CorruptionError, UnsupportedFormatError
from tiered.formats import byte_planes, container
from tiered.formats.container import HEADER, decode_container, encode_container
from tiered.model.tables import GAP_DTYPE, RUN_DTYPE

KIND = b"RMQTTEST"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def _table(dtype: np.dtype[Any], rows: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, rows * dtype.itemsize, np.uint8).view(dtype)


def _sample() -> bytes:
    tables = {"runs": _table(RUN_DTYPE, 40, 1), "gaps": np.zeros(9, GAP_DTYPE)}
    return encode_container(KIND, {"name": "x", "list": [1, 2]}, tables)


DATA = _sample()


@settings(max_examples=examples(100), deadline=None)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.integers(0, 50), st.integers(0, 5))
def test_what_goes_in_comes_out(header: dict[str, Any], rows: int, other_rows: int) -> None:
    tables = {"runs": _table(RUN_DTYPE, rows, rows), "gaps": _table(GAP_DTYPE, other_rows, 1)}
    found = decode_container(encode_container(KIND, header, tables) + b"more", KIND, source="s")
    assert found.header == header
    assert {name: table.tolist() for name, table in found.tables.items()} == {
        name: table.tolist() for name, table in tables.items()
    }
    assert found.tables["runs"].dtype == RUN_DTYPE


def test_equal_content_gives_equal_bytes() -> None:
    assert _sample() == DATA


@pytest.mark.parametrize("has_numba", [False, True])
def test_planes_hold_the_bytes_of_differences(has_numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    if has_numba:
        pytest.importorskip("numba")
    table = _table(RUN_DTYPE, 30, 5)
    words = []
    for name in RUN_DTYPE.names or ():
        numbers = table[name].tolist()
        for before, value in zip([0, *numbers[:-1]], numbers, strict=True):
            difference = (value - before + (1 << 63)) % (1 << 64) - (1 << 63)
            words.append((difference << 1 ^ difference >> 63) % (1 << 64))
    planes = bytes(word >> 8 * plane & 0xFF for plane in range(8) for word in words)
    assert byte_planes.encode(table) == planes
    assert byte_planes.decode(b"12" + planes, 2, 30, RUN_DTYPE).tolist() == table.tolist()
    with pytest.raises(ValueError, match="smaller"):
        byte_planes.decode(planes, 1, 30, RUN_DTYPE)


def test_what_does_not_shrink_is_stored_as_it_is() -> None:
    data = encode_container(KIND, {}, {"t": _table(np.dtype([("x", "<u8")]), 500, 3)})
    assert decode_container(data, KIND, source="s").tables["t"].nbytes == 4000


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, len(DATA) * 8 - 1))
def test_any_flipped_bit_is_a_corruption(bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptionError, match=r"^here "):
        decode_container(bytes(damaged), KIND, source="here")


@given(st.integers(0, len(DATA) - 1))
def test_any_truncation_is_a_corruption(length: int) -> None:
    with pytest.raises(CorruptionError, match=r"^here "):
        decode_container(DATA[:length], KIND, source="here")


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=300))
def test_any_payload_with_a_valid_checksum_parses_or_is_a_corruption(payload: bytes) -> None:
    fields = HEADER.pack(KIND, 1, 0, 0, len(payload), len(payload), fastcrc.crc32.iscsi(payload), 0)[:-4]
    data = fields + fastcrc.crc32.iscsi(fields).to_bytes(4, "little") + payload
    try:
        decode_container(data, KIND, source="s")
    except CorruptionError as error:
        assert str(error).startswith("s ")


def test_another_kind_is_a_corruption() -> None:
    with pytest.raises(CorruptionError, match="RMQTOTHR"):
        decode_container(DATA, b"RMQTOTHR", source="s")


def test_a_newer_major_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(container, "FORMAT_MAJOR", 2)
        newer = _sample()
    with pytest.raises(
        UnsupportedFormatError, match=r"RMQTTEST container has format 2\.\d, and this program reads 1\.x"
    ):
        decode_container(newer, KIND, source="s")


def test_a_newer_minor_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(container, "FORMAT_MINOR", 7)
        newer = _sample()
    assert decode_container(newer, KIND, source="s").header["name"] == "x"


def test_a_frame_that_claims_more_than_the_header_is_never_expanded() -> None:
    """A bomb behind a valid checksum: a megabyte of zeros that calls itself ten bytes."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    fields = HEADER.pack(KIND, 1, 0, 1, 10, len(bomb), fastcrc.crc32.iscsi(bomb), 0)[:-4]
    data = fields + fastcrc.crc32.iscsi(fields).to_bytes(4, "little") + bomb
    with pytest.raises(CorruptionError, match="length that the header says"):
        decode_container(data, KIND, source="s")

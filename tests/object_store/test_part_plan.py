"""Parts of composed objects: bytes, order and the sizes that S3 allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.object_store.interface import Body, FileRange, ObjectRange, Piece
from tiered.object_store.part_plan import (
    COPY_BYTES_MAX,
    PART_BYTES_MIN,
    copied_range,
    joined,
    piece_bytes,
    plan_parts,
    sent_bytes,
)

MIB = 1024 * 1024


def shape(pieces: list[Piece], part_bytes: int = 16 * MIB) -> list[tuple[str, int]]:
    """What becomes of each part, and its length."""
    return [
        ("copy" if copied_range(part) else "send", sum(map(piece_bytes, part)))
        for part in plan_parts(pieces, part_bytes)
    ]


def source(length: int, offset: int = 0, key: str = "a") -> ObjectRange:
    return ObjectRange(key, offset, length)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], []),
        ([b"x"], [("send", 1)]),
        ([source(6 * MIB)], [("copy", 6 * MIB)]),
        ([source(4 * MIB)], [("send", 4 * MIB)]),
        ([b"h" * 16, source(12 * MIB)], [("send", 5 * MIB), ("copy", 7 * MIB + 16)]),
        ([b"h" * 16, source(9 * MIB)], [("send", 9 * MIB + 16)]),
        (
            [source(6 * MIB), source(6 * MIB, key="b"), b"tail"],
            [("copy", 6 * MIB), ("copy", 6 * MIB), ("send", 4)],
        ),
        ([source(6 * MIB), source(6 * MIB, offset=6 * MIB)], [("copy", 12 * MIB)]),
        ([source(1 * MIB), source(20 * MIB, key="b")], [("send", 5 * MIB), ("copy", 16 * MIB)]),
        ([source(MIB, key=str(key)) for key in range(20)], [("send", 16 * MIB), ("send", 4 * MIB)]),
        ([source(600 * MIB)], [("copy", 200 * MIB)] * 3),
        ([FileRange("f", 0, 40 * MIB)], [("send", 16 * MIB), ("send", 16 * MIB), ("send", 8 * MIB)]),
        ([FileRange("f", 0, 7 * MIB), source(8 * MIB)], [("send", 7 * MIB), ("copy", 8 * MIB)]),
    ],
)
def test_shapes(pieces: list[Piece], expected: list[tuple[str, int]]) -> None:
    assert shape(pieces) == expected


def units(pieces: Body | list[Piece]) -> list[object]:
    """One item for each MiB, to compare order and completeness."""
    found: list[object] = []
    for piece in pieces:
        if isinstance(piece, ObjectRange | FileRange):
            step = range(piece.offset, piece.offset + piece.length, MIB // 2)
            found += [(piece[0], at) for at in step]
        else:
            found += [bytes(piece[at : at + MIB // 2]) for at in range(0, len(piece), MIB // 2)]
    return found


HALF = MIB // 2
PIECES = st.lists(
    st.one_of(
        st.builds(
            ObjectRange,
            st.sampled_from("ab"),
            st.integers(0, 20).map(lambda n: n * HALF),
            st.integers(0, 40).map(lambda n: n * HALF),
        ),
        st.builds(
            FileRange,
            st.just("f"),
            st.integers(0, 3).map(lambda n: n * HALF),
            st.integers(0, 12).map(lambda n: n * HALF),
        ),
        st.integers(0, 6).map(lambda n: bytes([n]) * (n * HALF)),
    ),
    max_size=12,
)


@given(pieces=PIECES, part_mib=st.sampled_from([5, 8, 16]))
def test_parts_hold_every_byte_once_in_order_within_the_limits(pieces: list[Piece], part_mib: int) -> None:
    planned = plan_parts(pieces, part_mib * MIB)
    assert units([piece for part in planned for piece in part]) == units(pieces)
    sizes = [sum(map(piece_bytes, part)) for part in planned]
    assert all(size >= PART_BYTES_MIN for size in sizes[:-1])
    assert all(
        size <= (COPY_BYTES_MAX if copied_range(part) else part_mib * MIB + PART_BYTES_MIN)
        for part, size in zip(planned, sizes, strict=True)
    )
    assert units(joined(pieces)) == units(pieces)


def test_large_ranges_are_not_sent() -> None:
    assert sent_bytes([b"abc", source(6 * MIB), source(MIB), FileRange("f", 0, 7)]) == 3 + MIB + 7

"""Bodies for synthetic stores: unique, valid JSON of exact size that zstd 1 shrinks to about a quarter.

Owns the text. Does not own records or files. A pool of random JSON fields is made once with numpy; a body is
a unique id, a slice of whole fields from the pool and blanks up to its size, so that a body costs two slices
and a join, whatever its size. Deterministic by seed.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WORDS = (
    "order",
    "amount",
    "currency",
    "customer",
    "status",
    "created",
    "warehouse",
    "shipping",
    "invoice",
    "discount",
    "priority",
    "channel",
    "paid",
    "pending",
    "north",
    "south",
)
POOL_BYTES = 32 * 1024 * 1024
"""Larger than what shares a compressed block, so that slices of one block rarely overlap."""
HEAD_BYTES = 24
"""Of ``{"id":"0123456789abcdef"``."""
BODY_BYTES_MIN = HEAD_BYTES + 1

_FIELDS_PER_STEP = 1 << 18
_WORD_BYTES = max(map(len, WORDS))


def hex_digits(
    numbers: NDArray[np.uint64], digits: int, alphabet: bytes = b"0123456789abcdef"
) -> NDArray[np.uint8]:
    """The last ``digits`` hexadecimal digits of each number as a row of characters."""
    shifts = np.arange(digits - 1, -1, -1, dtype=np.uint64) * np.uint64(4)
    nibbles = (numbers[:, None] >> shifts[None, :]) & np.uint64(15)
    return np.frombuffer(alphabet, np.uint8)[nibbles.astype(np.intp)]


def decimal_digits(numbers: NDArray[np.int64], digits: int) -> NDArray[np.uint8]:
    """The last ``digits`` decimal digits of each number as a row of characters."""
    powers = 10 ** np.arange(digits - 1, -1, -1, dtype=np.int64)
    return ((numbers[:, None] // powers[None, :]) % 10 + ord("0")).astype(np.uint8)


class JsonBodies:
    """Makes the body of message ``index`` for any index; the same seed and size give the same bytes."""

    def __init__(self, seed: int, *, pool_bytes: int = POOL_BYTES) -> None:
        self._seed = seed
        self._pool, self._field_starts = _pool_of(seed, pool_bytes)
        self._blanks = [b" " * count + b"}" for count in range(256)]

    def bodies(self, first_index: int, sizes: NDArray[np.int64]) -> list[bytes]:
        """Bodies of consecutive messages; ``sizes`` in bytes, at least BODY_BYTES_MIN each."""
        if len(sizes) and int(sizes.min()) < BODY_BYTES_MIN:
            raise ValueError(f"a body is at least {BODY_BYTES_MIN} bytes")
        indices = np.arange(first_index, first_index + len(sizes), dtype=np.uint64)
        begin, end = self._slices(indices, sizes - BODY_BYTES_MIN)
        blanks = sizes - BODY_BYTES_MIN - (end - begin)
        heads = self._heads(indices)
        pool = self._pool
        return [
            heads[at : at + HEAD_BYTES] + pool[one:two] + self._blank(rest)
            for at, one, two, rest in zip(
                range(0, len(heads), HEAD_BYTES), begin.tolist(), end.tolist(), blanks.tolist(), strict=True
            )
        ]

    def _slices(
        self, indices: NDArray[np.uint64], room: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Whole fields from a scattered place of the pool, as many as fit into ``room``."""
        starts = self._field_starts
        choices = np.searchsorted(starts, np.maximum(starts[-1] - room, 0), "right").astype(np.uint64)
        first_field = _scatter(indices, self._seed) % choices
        begin = starts[first_field.astype(np.int64)]
        end = starts[np.searchsorted(starts, begin + room, "right") - 1]
        return begin, end

    def _heads(self, indices: NDArray[np.uint64]) -> bytes:
        rows = np.empty((len(indices), HEAD_BYTES), np.uint8)
        rows[:, :7] = np.frombuffer(b'{"id":"', np.uint8)
        rows[:, 7:23] = hex_digits(indices, 16)
        rows[:, 23] = ord('"')
        return rows.tobytes()

    def _blank(self, count: int) -> bytes:
        return self._blanks[count] if count < len(self._blanks) else b" " * count + b"}"


def _scatter(indices: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: well-spread numbers from consecutive ones."""
    mixed = indices + np.uint64((seed * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@lru_cache(maxsize=2)
def _pool_of(seed: int, pool_bytes: int) -> tuple[bytes, NDArray[np.int64]]:
    """Kept: a process that writes many small stores would spend its time here."""
    return _make_pool(np.random.default_rng(seed), pool_bytes)


def _make_pool(random: np.random.Generator, pool_bytes: int) -> tuple[bytes, NDArray[np.int64]]:
    """Fields ``,"word":value`` one after another, and where each starts (with the end of the last)."""
    pieces: list[bytes] = []
    lengths: list[NDArray[np.int64]] = []
    total = 0
    while total < pool_bytes:
        padded = _random_fields(random, min(_FIELDS_PER_STEP, max(64, (pool_bytes - total) // 16)))
        written = padded != 0
        pieces.append(padded[written].tobytes())
        lengths.append(written.sum(axis=1).astype(np.int64))
        total += len(pieces[-1])
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    return b"".join(pieces), starts


def _random_fields(random: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """``count`` fields, one a row, with zero bytes where a shorter text leaves room."""
    words = _word_table(WORDS)
    kind = random.integers(0, 10, count)
    rows = np.zeros((count, 4 + _WORD_BYTES + 3 + 2 * _WORD_BYTES), np.uint8)
    rows[:, :2] = np.frombuffer(b',"', np.uint8)
    rows[:, 2 : 2 + _WORD_BYTES] = words[random.integers(0, len(WORDS), count)]
    rows[:, 2 + _WORD_BYTES : 4 + _WORD_BYTES] = np.frombuffer(b'":', np.uint8)
    value = rows[:, 4 + _WORD_BYTES :]
    value[:, :6] = np.where((kind < 5)[:, None], _plain_numbers(random.integers(0, 1_000_000, count)), 0)
    value[kind >= 5, 0] = ord('"')
    value[kind >= 5, -1] = ord('"')
    hexes = (kind == 5) | (kind == 6)
    value[hexes, 1:11] = hex_digits(random.integers(0, 1 << 40, int(hexes.sum())).astype(np.uint64), 10)
    pairs = np.flatnonzero(kind >= 7)
    value[pairs, 1 : 1 + _WORD_BYTES] = words[random.integers(0, len(WORDS), len(pairs))]
    value[pairs, 1 + _WORD_BYTES] = ord("-")
    value[pairs, 2 + _WORD_BYTES : 2 + 2 * _WORD_BYTES] = words[random.integers(0, len(WORDS), len(pairs))]
    return rows


def _plain_numbers(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Six columns of digits without leading zeros (zero bytes instead)."""
    digits = decimal_digits(numbers, 6)
    leading = numbers[:, None] < 10 ** np.arange(5, -1, -1, dtype=np.int64)[None, :]
    leading[:, -1] = False
    return np.where(leading, 0, digits).astype(np.uint8)


def _word_table(words: Sequence[str]) -> NDArray[np.uint8]:
    table = np.zeros((len(words), _WORD_BYTES), np.uint8)
    for row, word in zip(table, words, strict=True):
        row[: len(word)] = np.frombuffer(word.encode("ascii"), np.uint8)
    return table

"""How bytes and JSON documents are changed: what storage, networks and defects do to them. Pure."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ODD_NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    1 << 31,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1 << 31,
    1 << 32,
    -(1 << 63),
    1 << 63,
    1 << 64,
    1 << 200,
    1.5,
    float("inf"),
    "",
    "x",
    "-1",
    "\ud800".encode("utf-8", "replace").decode(),
    "../../x",
    "\x00",
    [],
    [[]],
    {},
    {"a": {}},
    [1, 2, 3],
    ["x"] * 50,
)


class Mutation(NamedTuple):
    """One change: what, where, and with which number."""

    kind: int
    place: int
    value: int


def changed(samples: Sequence[bytes], number: int, mutations: Sequence[Mutation]) -> bytes:
    """Sample ``number``, bent."""
    data = bytearray(samples[number])
    for mutation in mutations:
        _change(data, samples, mutation)
    return bytes(data)


def _change(data: bytearray, samples: Sequence[bytes], mutation: Mutation) -> None:
    kind, place, value = mutation
    if not data:
        data += value.to_bytes(8, "little")
        return
    at = place % len(data)
    length = 1 + value % min(64, len(data))
    match kind % 8:
        case 0:
            data[at] ^= 1 << value % 8
        case 1:
            data[at] = value & 0xFF
        case 2:
            size = (1, 2, 4, 8)[value % 4]
            odd = ODD_NUMBERS[value // 4 % len(ODD_NUMBERS)] & ((1 << 8 * size) - 1)
            data[at : at + size] = odd.to_bytes(size, ("little", "big")[value // 64 % 2])
        case 3:
            del data[at:]
        case 4:
            del data[at : at + length]
        case 5:
            data[at:at] = data[:length]
        case 6:
            other = samples[value % len(samples)]
            data[at:] = other[at:]
        case 7:
            data[at : at + length] = bytes(length)


def changed_json(document: Any, mutations: Sequence[Mutation]) -> Any:
    """A document with odd values in odd places, or without some; ``mutations`` choose."""
    holder = [copy.deepcopy(document)]
    for kind, place, value in mutations:
        places = list(_places(holder))
        parent, key = places[place % len(places)]
        if value % 7 == 0 and parent is not holder:
            del parent[key]
        elif value % 7 == 1 and isinstance(parent, list) and parent is not holder:
            parent.append(parent[key])
        else:
            parent[key] = copy.deepcopy(ODD_VALUES[(value // 7 + kind) % len(ODD_VALUES)])
    return holder[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(parent, key or index) of every value."""
    if isinstance(value, list):
        keys: list[Any] = list(range(len(value)))
    elif isinstance(value, dict):
        keys = list(value)
    else:
        return
    for key in keys:
        yield value, key
        yield from _places(value[key])

"""Values of a catalog document with the types they must have: JSON promises none of them.

A right checksum says that bytes are as somebody wrote them, not that they make sense. Raises TypeError or ValueError,
which decoders turn into a CorruptionError that names the object.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def whole(value: Any) -> int:
    """A 64-bit number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} has more than 64 bits")
    return value


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def texts(value: Any) -> list[str]:
    """A list of strings."""
    found = items(value)
    if not set(map(type, found)) <= {str}:
        raise TypeError("a list of texts holds something else")
    return found


def items(value: Any) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def fields(value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is no object")
    return dict(value)


def text_fields(value: Any) -> dict[str, str]:
    """An object whose values are strings."""
    return {name: text(found) for name, found in fields(value).items()}


def row(kind: type[T], value: Any) -> T:
    """A named tuple of whole numbers, strings, truth values and named tuples of these, from a list."""
    wanted: Any = kind  # a type is hashable, whatever mypy thinks of type[T]
    expected = _types_of(wanted)
    found = items(value)
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} values for the {len(expected)} of {kind.__name__}")
    return kind(*(_checked(type_, item) for type_, item in zip(expected, found, strict=True)))


@cache
def _types_of(kind: Hashable) -> tuple[type[Any], ...]:
    return tuple(get_type_hints(kind).values())


def _checked(wanted: type[Any], value: Any) -> Any:
    if wanted is int:
        return whole(value)
    if wanted is str:
        return text(value)
    if wanted is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{value!r} is neither true nor false")
        return value
    return row(wanted, value)

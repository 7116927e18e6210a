"""Checks the types of values in catalog documents, as JSON has no schema.

A valid checksum does not make a document valid. Raises TypeError or ValueError, which decoders turn into a
CorruptionError naming the object.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def whole(value: Any) -> int:
    """A 64-bit integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value} is not an integer")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} has more than 64 bits")
    return value


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{value} is not a string")
    return value


def texts(value: Any) -> list[str]:
    """A list of strings."""
    found = items(value)
    if not set(map(type, found)) <= {str}:
        raise TypeError("a list that must hold only strings holds other values")
    return found


def items(value: Any) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise TypeError(f"{value} is not a JSON list")
    return value


def fields(value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{value} is not a JSON object")
    return dict(value)


def text_fields(value: Any) -> dict[str, str]:
    """An object whose values are strings."""
    return {name: text(found) for name, found in fields(value).items()}


def row(kind: type[T], value: Any) -> T:
    """A named tuple of integers, strings, booleans and such tuples, from a list."""
    wanted: Any = kind  # mypy does not treat type[T] as hashable
    expected = _types_of(wanted)
    found = items(value)
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} values, but {kind.__name__} has {len(expected)}")
    return kind(*(_checked(type_, item) for type_, item in zip(expected, found, strict=True)))


@cache
def _types_of(kind: Hashable) -> tuple[type[Any], ...]:
    return tuple(get_type_hints(kind).values())


def _checked(wanted: type[Any], value: Any) -> Any:
    """The value, if it is of the wanted type; a boolean is no number here, as it is in Python."""
    if wanted is int:
        return whole(value)
    if wanted is str:
        return text(value)
    if wanted is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{value} is not a boolean")
        return value
    return row(wanted, value)

"""Checks the types of values in catalog documents, as JSON has no schema.

A valid checksum does not make a document valid. Raises TypeError or ValueError, which decoders turn into a
CorruptionError naming the object.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def whole(value: Any) -> int:
    """``value``, if it is an integer of 64 bits. Raises TypeError or ValueError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} stands where an integer must be")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"the number {value} has more than 64 bits")
    return value


def text(value: Any) -> str:
    """``value``, if it is a string. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"the value {value!r} is not a string")
    return value


def texts(value: Any) -> list[str]:
    """``value``, if it is a list of strings. Raises TypeError."""
    strings = items(value)
    if not set(map(type, strings)) <= {str}:
        raise TypeError(f"the list {value!r} must hold only strings")
    return strings


def items(value: Any) -> list[Any]:
    """``value``, if it is a list, of anything. Raises TypeError."""
    if not isinstance(value, list):
        raise TypeError(f"the value {value!r} is not a JSON list")
    return value


def fields(value: Any) -> dict[str, Any]:
    """``value``, if it is a JSON object. Raises TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"the value {value!r} is not a JSON object")
    return dict(value)


def text_fields(value: Any) -> dict[str, str]:
    """``value``, if it is a JSON object whose values are strings. Raises TypeError."""
    return {name: text(item) for name, item in fields(value).items()}


def row(kind: type[T], value: Any) -> T:
    """The named tuple of type ``kind`` whose fields a JSON list holds in their order: integers, strings, booleans, and
    named tuples of these. Raises TypeError or ValueError."""
    hashable_kind: Any = kind  # mypy does not treat type[T] as hashable
    types = _types_of(hashable_kind)
    values = items(value)
    if len(values) != len(types):
        raise ValueError(f"a {kind.__name__} has {len(types)} fields, but the list has {len(values)} values")
    return kind(*(_checked(type_, item) for type_, item in zip(types, values, strict=True)))


@cache
def _types_of(kind: Hashable) -> tuple[type[Any], ...]:
    return tuple(get_type_hints(kind).values())


def _checked(wanted: type[Any], value: Any) -> Any:
    """``value`` if it is of the type ``wanted``: an integer, a string, a boolean, or the fields of a named tuple.
    Unlike in Python, a boolean is no integer. Raises TypeError or ValueError."""
    if wanted is int:
        return whole(value)
    if wanted is str:
        return text(value)
    if wanted is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{value!r} is found where true or false is expected")
        return value
    return row(wanted, value)

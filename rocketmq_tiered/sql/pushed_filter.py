"""Reads a filter of Arrow as a value: the columns that it needs, and a predicate that admits every row that it does.

Arrow's own serialization of an expression has its calls, fields and literals in the order of writing, as the metadata
of a table whose columns are the literals. What is not understood here is not pushed down.
"""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pyarrow as pa

from rocketmq_tiered.message_table.options.predicate import (
    COMPARISONS,
    NUMBER_COLUMNS,
    Allowed,
    Predicate,
    has_code,
)
from tiered.model.dates import DATES_BEGIN_MS, DATES_END_MS

_METADATA_AT = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Where ArrowSchema of Arrow's C data interface has the metadata: behind ``format`` and ``name``."""
_TURNED = {
    "equal": "equal",
    "not_equal": "not_equal",
    "less": "greater",
    "less_equal": "greater_equal",
    "greater": "less",
    "greater_equal": "less_equal",
}
_UNITS_PER_MS = {"ms": 1, "us": 1_000, "ns": 1_000_000}


@dataclass
class Call:
    """A function with its arguments: calls, literals, and names of fields."""

    name: str
    arguments: list[Any] = field(default_factory=list)
    options: Any = None


def read_filter(expression: Any, names: Mapping[str, str]) -> tuple[Predicate, set[str] | None]:
    """Read an Arrow expression, which DuckDB passes to a scan, as a predicate of the archive. Also returns the names of
    its fields; None if the expression cannot be read, and the predicate then admits every row. ``names``: the archive's
    column for each field."""
    whole, fields = Call(""), set[str]()
    stack = [whole]
    try:
        table = pa.ipc.open_file(expression.__reduce__()[1][0]).read_all()
        for kind, value in _pairs(table.schema):
            if kind == "call":
                stack.append(Call(value))
                stack[-2].arguments.append(stack[-1])
            elif kind == "end":
                stack.pop()
            elif kind == "options":
                stack[-1].options = table.column(int(value))[0]
            else:
                is_field = {"field_ref": True, "literal": False}[kind]
                stack[-1].arguments.append(value if is_field else table.column(int(value))[0])
                fields |= {value} if is_field else set()
    except (pa.ArrowException, KeyError):  # such as a field of a field
        return Predicate(), None
    return _predicate(whole.arguments[0], names), fields


def _pairs(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """The pairs of key and value in the metadata of an Arrow schema. They are read through Arrow's C interface, because
    keys repeat here and pyarrow's dictionary would keep only one value for each."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = schema.__arrow_c_schema__()
    at = ctypes.c_void_p.from_address(int(pointer_of(capsule, b"arrow_schema")) + _METADATA_AT).value or 0
    texts, count = list[str](), 2 * ctypes.c_int32.from_address(at).value
    for _ in range(count):
        size = ctypes.c_int32.from_address(at + 4).value
        texts.append(ctypes.string_at(at + 8, size).decode())
        at += 4 + size
    return zip(texts[::2], texts[1::2], strict=True)


def _predicate(call: Any, names: Mapping[str, str]) -> Predicate:
    """The predicate of an expression, built from those of its parts. A part that is not understood admits every row."""
    match call:
        case Call("and_kleene", parts):
            return reduce(Predicate.also, (_predicate(part, names) for part in parts))
        case Call("or_kleene", parts):
            return reduce(Predicate.either, (_predicate(part, names) for part in parts))
        case Call("invert", [inner]):
            return _other(inner, names)
        case Call("not_equal", arguments):
            return _other(Call("equal", arguments), names)
    return _condition(call, names)


def _other(call: Any, names: Mapping[str, str]) -> Predicate:
    """What a condition on numbers does not admit: they are never null."""
    numbers = _condition(call, names).numbers
    return Predicate({name: allowed.outside() for name, allowed in numbers.items()})


def _condition(call: Any, names: Mapping[str, str]) -> Predicate:
    """The predicate of a condition on one column. For a column of numbers it admits exactly the values for which the
    condition is true, so that it may be negated."""
    match call:
        case Call("if_else", [Call("is_valid"), inner, pa.BooleanScalar(is_valid=False)]):
            return _condition(inner, names)
        case Call("is_in", [str(name)]):
            comparison, literals = "equal", list(call.options["value_set"].values)
        case Call("is_null", [str(name)]):
            comparison, literals = "equal", []
        case Call(comparison, [str(name), pa.Scalar() as literal]):
            literals = [literal]
        case Call(comparison, [pa.Scalar() as literal, str(name)]):
            comparison, literals = _TURNED.get(comparison, ""), [literal]
        case _:
            return Predicate()
    column = names.get(name, "")
    if column == "tags" and comparison == "equal":
        tags = frozenset(literal.as_py() or "\ufffd" for literal in literals) or frozenset([""])
        return Predicate(tags=tags) if tags == {""} or all(map(has_code, tags)) else Predicate()
    if column == "topic" and comparison == "equal":
        return Predicate(topics=frozenset(literal.as_py() for literal in literals if literal.is_valid))
    if column in ("keys", "uniqKey") and comparison == "equal":
        # The property KEYS holds words separated by spaces. The key index has each word, so the first one is enough.
        keys = frozenset(
            text.strip(" ").split(" ")[0] if column == "keys" else text
            for text in (literal.as_py() or "" for literal in literals)
        )
        return Predicate(keys=keys) if keys and all(map(has_code, keys)) else Predicate()
    bounds = [_bounds(literal, is_time=column == "storeTime") for literal in literals]
    column = "storeTimestamp" if column == "storeTime" else column
    if column not in NUMBER_COLUMNS or comparison not in COMPARISONS or None in bounds:
        return Predicate()
    ranges = [one for pair in bounds if pair for one in COMPARISONS[comparison](*pair).ranges]
    return Predicate({column: Allowed(()).either(Allowed(tuple(ranges)))})


def _bounds(literal: Any, *, is_time: bool) -> tuple[int, int] | None:
    """The two integers next to a literal of a condition, or for a time the two milliseconds since the epoch: the
    largest not above it and the smallest not below it. None if the literal is of another type, or if it is a time not
    between the first and the last date: damaged store timestamps that have no date are shown as one of these."""
    kind = literal.type
    if not literal.is_valid or (pa.types.is_timestamp(kind) and kind.tz is not None) != is_time:
        return None
    if not is_time:
        return (literal.as_py(), literal.as_py()) if pa.types.is_integer(kind) else None
    units = _UNITS_PER_MS.get(kind.unit, 0)
    is_inside = units and DATES_BEGIN_MS < literal.value // units < DATES_END_MS
    return (literal.value // units, -(-literal.value // units)) if is_inside else None

"""Finds in DuckDB's own tree of a SELECT what DuckDB does not pass on to a scan. Pure.

Conditions on the day of a time, and the last rows of one topic. Places are bytes of the statement's text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

ROWS_MAX = 10_000
DAYS_MAX = 64
"""Days of one condition whose ranges are written out."""
_VARIES = re.compile(rb'"(SUBQUERY|WINDOW|random|gen_random_uuid|uuid|uuidv4|uuidv7|nextval)"')
"""A tree that contains one of these may have another value, or another effect, when it is evaluated a second time."""
_FIRST, _END = "day::DATE::TIMESTAMPTZ", "(day::DATE + 1)::TIMESTAMPTZ"
_WITHIN = f"time >= {_FIRST} - INTERVAL 3 HOUR", f"time < {_END} + INTERVAL 3 HOUR"
"""Both are true of each time from one day to another, and of some hours more, as time zones repeat and skip hours."""
_OUTSIDE = f"time < {_FIRST} + INTERVAL 3 HOUR", f"time >= {_END} - INTERVAL 3 HOUR"
"""For each other time one of these is true."""
Node = dict[str, Any]


_IS_LOW = {
    "COMPARE_LESSTHAN": False,
    "COMPARE_LESSTHANOREQUALTO": False,
    "COMPARE_GREATERTHAN": True,
    "COMPARE_GREATERTHANOREQUALTO": True,
}


class LastRows(NamedTuple):
    """So many ``rows``, those with the highest values of ``column``, of ``table``, which is written at ``location``."""

    table: str
    location: tuple[int, int]
    column: str
    rows: int


def add_ranges(tree: Any, parse: Callable[[str], Node]) -> bool:
    """Add to each WHERE of a statement's tree that has conditions on ``store_time::DATE`` the ranges of ``store_time``
    in which these can be true, because a range can be passed to the scan. Returns whether any was added. ``parse``
    makes the tree of an expression."""
    found = False
    for node in list(_nodes(tree)):
        where = node.get("where_clause")
        if where and (ranges := _ranges(where, parse)):
            node["where_clause"], found = _joined("AND", [where, ranges]), True
    return found


def _nodes(tree: Any) -> Iterator[Node]:
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(part)


def _ranges(node: Node, parse: Callable[[str], Node], is_true: bool = True) -> Node | None:
    """A condition on the time alone that is true wherever the condition ``node`` is true; with ``is_true`` False,
    wherever that is not true. None if nothing follows for the time."""
    match node:
        case {"type": "OPERATOR_NOT", "children": [inner]}:
            return _ranges(inner, parse, not is_true)
        case {"class": "CONJUNCTION", "type": kind, "children": parts}:
            found = [one for part in parts if (one := _ranges(part, parse, is_true))]
            is_and = (kind == "CONJUNCTION_AND") == is_true
            is_known = found and (is_and or len(found) == len(parts))
            return _joined("AND" if is_and else "OR", found) if is_known else None
        case {"type": "COMPARE_BETWEEN", "input": tested, "lower": low, "upper": high}:
            pairs = [(low, high)]
        case {"type": "COMPARE_IN", "children": [tested, *days]}:
            pairs = [(day, day) for day in days]
        case {"type": "COMPARE_EQUAL" | "COMPARE_NOTEQUAL" as kind, "left": tested, "right": day}:
            tested, day = (tested, day) if _time_of(tested) else (day, tested)
            pairs, is_true = [(day, day)], is_true == (kind == "COMPARE_EQUAL")
        case {"class": "COMPARISON", "type": kind, "left": tested, "right": day} if kind in _IS_LOW:
            is_low = _IS_LOW[kind] == is_true
            if not _time_of(tested):
                tested, day, is_low = day, tested, not is_low
            pairs, is_true = [(day, None) if is_low else (None, day)], True
        case _:
            return None
    time = _time_of(tested)
    written = orjson.dumps(pairs)
    if time is None or len(pairs) > DAYS_MAX or b'"COLUMN_REF"' in written or _VARIES.search(written):
        return None
    outer, inner, texts = ("OR", "AND", _WITHIN) if is_true else ("AND", "OR", _OUTSIDE)
    return _joined(
        outer,
        [
            _joined(
                inner,
                [
                    _filled(parse(text), time, day)
                    for text, day in zip(texts, pair, strict=True)
                    if day is not None
                ],
            )
            for pair in pairs
        ],
    )


def _time_of(node: Node) -> Node | None:
    """The node of the column in ``CAST(store_time AS DATE)``; None for any other expression."""
    match node:
        case {
            "class": "CAST",
            "child": {"class": "COLUMN_REF", "column_names": [*_, "store_time"]},
            "type_expr": {"type_name": "DATE"},
            "try_cast": False,
        }:
            return dict(node["child"])
    return None


def _joined(kind: str, parts: Sequence[Node]) -> Node:
    names = {"class": "CONJUNCTION", "type": f"CONJUNCTION_{kind}", "alias": "", "query_location": 0}
    return parts[0] if len(parts) == 1 else {**names, "children": parts}


def _filled(node: Any, time: Node, day: Node) -> Any:
    """A copy of the tree ``node`` in which ``time`` stands for the column "time" and ``day`` for every other column."""
    match node:
        case {"class": "COLUMN_REF", "column_names": [name]}:
            return time if name == "time" else day
        case dict():
            return {name: _filled(part, time, day) for name, part in node.items()}
        case list():
            return [_filled(part, time, day) for part in node]
    return node


def last_rows(tree: Any) -> LastRows | None:
    """The topic and number of rows of a statement ``SELECT … FROM topic … ORDER BY queue_offset DESC LIMIT n`` whose
    result depends on no other rows; None for any other statement."""
    match tree:
        case {
            "statements": [
                {
                    "node": {
                        "type": "SELECT_NODE",
                        "modifiers": [
                            {
                                "type": "ORDER_MODIFIER",
                                "orders": [
                                    {
                                        "type": "DESCENDING",
                                        "expression": {
                                            "class": "COLUMN_REF",
                                            "column_names": [
                                                "queue_offset" | "store_timestamp" | "store_time" as column
                                            ],
                                        },
                                    },
                                    *_,
                                ],
                            },
                            {
                                "type": "LIMIT_MODIFIER",
                                "limit": {"class": "CONSTANT", "literal": {"kind": "INTEGER", "text": count}},
                                "offset": None,
                                "limit_type": "ROW_COUNT",
                            },
                        ],
                        "from_table": {
                            "type": "BASE_TABLE",
                            "table_name": table,
                            "query_location": at,
                            "query_location_length": size,
                            "sample": None,
                            "at_clause": None,
                            "column_name_alias": [],
                        },
                        "select_list": shown,
                        "group_expressions": [],
                        "aggregate_handling": "STANDARD_HANDLING",
                        "cte_map": {"map": []},
                        "having": None,
                        "sample": None,
                        "qualify": None,
                    }
                }
            ]
        } if (
            0 < int(count) <= ROWS_MAX
            and not _VARIES.search(orjson.dumps(tree))
            and all(one["alias"].lower() != column for one in shown)
            and not any(one.get(name) for one in shown for name in ("replace_list", "rename_list", "columns"))
        ):
            return LastRows(table, (at, size), column, int(count))
    return None

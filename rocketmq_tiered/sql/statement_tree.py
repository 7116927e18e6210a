"""What a SELECT asks that DuckDB does not tell a scan, from DuckDB's own tree of the statement. Pure.

Conditions on the day of a time, and the last rows of one topic. Places are bytes of the statement's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

ROWS_MAX = 10_000
_AT_LEAST = ("COMPARE_EQUAL", "COMPARE_GREATERTHAN", "COMPARE_GREATERTHANOREQUALTO")
_AT_MOST = ("COMPARE_EQUAL", "COMPARE_LESSTHAN", "COMPARE_LESSTHANOREQUALTO")
_OF_EACH_ROW = re.compile(rb'"(COLUMN_REF|SUBQUERY|WINDOW|LAMBDA|PARAMETER|random|uuid|nextval)"')
"""In an operand whose value may differ when it is written twice."""


class LastRows(NamedTuple):
    """So many ``rows``, those with the highest values of ``column``, of ``table``, which is written at ``location``."""

    table: str
    location: tuple[int, int]
    column: str
    rows: int


def with_ranges(text: str, tree: Any) -> str:
    """``text``, where each condition on ``store_time::DATE`` has beside it the range of times in which it can be true:
    a day more at both ends than the day has, as time zones repeat hours."""
    data = text.encode()
    found = {int(node["query_location"]): node for node in _day_conditions(tree)}
    for begin, node in sorted(found.items(), reverse=True):
        left = node["left"]
        end = begin + int(node["query_location_length"])
        rest = data[int(left["query_location"]) + int(left["query_location_length"]) : end].decode()
        operand = re.fullmatch(r"\s*[<=>]{1,2}(.*)", rest, re.DOTALL)
        if operand is None:
            continue
        column = ".".join(f'"{name}"' for name in left["child"]["column_names"])
        day, whole = f"({operand[1]})::DATE", data[begin:end].decode()
        if node["type"] in _AT_LEAST:
            whole += f" AND {column} >= {day} - INTERVAL 1 DAY"
        if node["type"] in _AT_MOST:
            whole += f" AND {column} < {day} + INTERVAL 2 DAY"
        data = data[:begin] + f"({whole})".encode() + data[end:]
    return data.decode()


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(part)


def _day_conditions(tree: Any) -> Iterator[dict[str, Any]]:
    for node in (one for clause in _nodes(tree) for one in _nodes(clause.get("where_clause"))):
        match node:
            case {
                "class": "COMPARISON",
                "left": {
                    "class": "CAST",
                    "child": {"class": "COLUMN_REF", "column_names": [*_, "store_time"]},
                    "type_expr": {"type_name": "DATE"},
                },
                "right": right,
            } if not _OF_EACH_ROW.search(orjson.dumps(right)):
                yield node


def last_rows(tree: Any) -> LastRows | None:
    """Of ``SELECT … FROM topic … ORDER BY queue_offset DESC LIMIT n``, whose result depends on no other rows."""
    classes = {node.get("class") for node in _nodes(tree)} | {node.get("type") for node in _nodes(tree)}
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
            and not classes & {"SUBQUERY", "WINDOW"}
            and all(one["alias"].lower() != column for one in shown)
            and not any(one.get(name) for one in shown for name in ("replace_list", "rename_list", "columns"))
        ):
            return LastRows(table, (at, size), column, int(count))
    return None

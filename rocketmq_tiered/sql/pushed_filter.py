"""What DuckDB's filter on a topic says about catalog and row columns: a predicate that prunes runs, blocks and rows.

DuckDB folds constants and rewrites conditions (``date_trunc`` to a range) before it hands a filter over, as an Arrow
expression whose only readable form is text. A condition that is not understood prunes nothing: the expression itself
is applied to every row afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import combinations

from rocketmq_tiered.message_table.options.predicate import NUMBER_COLUMNS, Allowed, Predicate, has_code
from rocketmq_tiered.sql.sql_columns import TABLE_NAMES

_COMPARISON = re.compile(r"\((\w+) (==|>=|<=|>|<) (.+)\)", re.DOTALL)
_MEMBER = re.compile(
    r"if_else\(is_valid\((\w+)\), is_in\(\1, \{value_set=\w+:\[\n(.*)\n\], null_matching_behavior=MATCH\}\), "
    r"null\[bool\]\)",
    re.DOTALL,
)
_BETWEEN_TEXTS = '",\n  "'
_TIME = "storeTimestamp"


def predicate_of(filter_text: str) -> Predicate:
    """The predicate of an expression's text. It admits every row that the expression does."""
    predicate = Predicate()
    for condition in _conjuncts(filter_text):
        found = _condition(condition)
        if found is not None:
            predicate = predicate.also(found)
    return predicate


def _conjuncts(text: str) -> Iterator[str]:
    """``(a and (b and c))`` -> a, b, c."""
    parts = _operands(text[1:-1]) if _is_wrapped(text) else [text]
    if len(parts) == 1:
        yield text
    for part in parts if len(parts) > 1 else ():
        yield from _conjuncts(part)


def _is_wrapped(text: str) -> bool:
    return (
        text.startswith("(") and next((at for at, depth in _depths(text) if depth == 0), -1) == len(text) - 1
    )


def _operands(text: str) -> list[str]:
    """The operands of ``and`` outside of parentheses and quotes."""
    cuts = [at for at, depth in _depths(text) if depth == 0 and text.startswith(" and ", at)]
    begins, ends = [0, *(cut + len(" and ") for cut in cuts)], [*cuts, len(text)]
    return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """(place, open parentheses after it) of each character outside of quotes."""
    depth, at = 0, 0
    while at < len(text):
        if text[at] == '"':
            at += 1
            while at < len(text) and text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        else:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            yield at, depth
        at += 1


def _condition(text: str) -> Predicate | None:
    if (compared := _COMPARISON.fullmatch(text)) is not None:
        name, operator, literal = compared.groups()
        return _comparison(TABLE_NAMES.get(name, ""), operator, literal)
    if (member := _MEMBER.fullmatch(text)) is not None:
        return _membership(TABLE_NAMES.get(member[1], ""), member[2])
    return None


def _comparison(name: str, operator: str, literal: str) -> Predicate | None:
    if name == "tags":
        plain = literal[1:-1]
        is_plain = operator == "==" and literal[:1] == '"' and "\\" not in plain and has_code(plain)
        return Predicate(tags=frozenset({plain})) if is_plain else None
    value = _milliseconds(literal) if name == "storeTime" else _integer(literal)
    if value is None or name not in ("storeTime", *NUMBER_COLUMNS):
        return None
    # Rows have whole milliseconds; a bound may lie inside one.
    step = 0 if name == "storeTime" else 1
    allowed = {
        "==": Allowed(value, value), ">=": Allowed(low=value), "<=": Allowed(high=value),
        ">": Allowed(low=value + step), "<": Allowed(high=value - step),
    }[operator]  # fmt: skip
    return Predicate({_TIME if name == "storeTime" else name: allowed})


def _membership(name: str, listed: str) -> Predicate | None:
    lines = [line.strip() for line in listed.split(",\n")]
    if name in NUMBER_COLUMNS:
        values = [_integer(line) for line in lines]
        known = [value for value in values if value is not None]
        return Predicate({name: Allowed(values=tuple(sorted(known)))}) if len(known) == len(lines) else None
    texts = listed.strip().removeprefix('"').removesuffix('"').split(_BETWEEN_TEXTS)
    if name != "tags" or len(texts) != len(lines) or not listed.strip().startswith('"'):
        return None  # a long list is printed in part
    # Arrow does not escape these texts: one may contain what is between two.
    cuts = combinations(range(len(texts) + 1), 2)
    joined = frozenset(_BETWEEN_TEXTS.join(texts[begin:end]) for begin, end in cuts)
    return Predicate(tags=joined) if all(map(has_code, joined)) else None


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def _milliseconds(text: str) -> int | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (
        None if time.tzinfo is None else (time - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
    )

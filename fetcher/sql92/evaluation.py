"""A tree compiled to nested functions: properties in, true, false or unknown out.

Owns the three-valued logic. A comparison that fails (text that is no number) fails the whole filter, unless what
stands before it has decided already, as in the broker. Source: the evaluate methods in
org.apache.rocketmq.filter.expression.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Final

from fetcher.sql92.expression import (
    Among,
    And,
    Comparison,
    Constant,
    Expression,
    Long,
    Match,
    Negate,
    Not,
    Or,
    Property,
    Truth,
    Value,
)  # fmt: skip
from fetcher.sql92.java_values import compare, compare_doubles, to_double

Lookup = Callable[[str], str | None]
"""A message: the text of a property, None when it has none of that name."""
Evaluate = Callable[[Lookup], Value]

_ORDERINGS: Final[dict[str, Callable[[int, int], bool]]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


def compile_expression(expression: Expression) -> Evaluate:
    """A function that evaluates ``expression``; it raises ValueClashError where the broker's would throw."""
    match expression:
        case Constant(value):
            return lambda lookup: value
        case Property(name):
            return lambda lookup: lookup(name)
        case Truth(Property(name)):
            return lambda lookup: None if lookup(name) is None else False
        case Negate(operand):
            return _negation(compile_expression(operand))
        case Not(operand):
            return _not(compile_expression(operand))
        case And(terms):
            return _junction([compile_expression(term) for term in terms], decisive=False)
        case Or(terms):
            return _junction([compile_expression(term) for term in terms], decisive=True)
        case Comparison("=", left, right):
            return _equality(compile_expression(left), compile_expression(right))
        case Comparison(sign, left, right):
            return _ordering(_ORDERINGS[sign], compile_expression(left), compile_expression(right))
        case Among(Property(name), texts, negated):
            return _among(name, texts, negated)
        case Match():
            return _text_match(expression)
    raise AssertionError(expression)


def _negation(operand: Evaluate) -> Evaluate:
    def evaluate(lookup: Lookup) -> Value:
        value = operand(lookup)
        if value is None or isinstance(value, str | bool):
            return None
        return Long(-value) if isinstance(value, Long) else -value

    return evaluate


def _not(operand: Evaluate) -> Evaluate:
    def evaluate(lookup: Lookup) -> Value:
        value = operand(lookup)
        return None if value is None else not value

    return evaluate


def _junction(terms: list[Evaluate], *, decisive: bool) -> Evaluate:
    def evaluate(lookup: Lookup) -> Value:
        outcome: Value = not decisive
        for term in terms:
            value = term(lookup)
            if value is decisive:
                return decisive
            if value is None:
                outcome = None
        return outcome

    return evaluate


def _equality(left: Evaluate, right: Evaluate) -> Evaluate:
    def evaluate(lookup: Lookup) -> Value:
        first, second = left(lookup), right(lookup)
        if first is None:
            return True if second is None else None
        if second is None:
            return False
        if isinstance(first, str) and isinstance(second, str):
            return first == second
        return compare(first, second) == 0

    return evaluate


def _ordering(decide: Callable[[int, int], bool], left: Evaluate, right: Evaluate) -> Evaluate:
    def evaluate(lookup: Lookup) -> Value:
        first = left(lookup)
        if first is None:
            return None
        second = right(lookup)
        if second is None:
            return None
        if isinstance(first, str) and isinstance(second, str):
            return decide(compare_doubles(to_double(first), to_double(second)), 0)
        return decide(compare(first, second), 0)

    return evaluate


def _among(name: str, texts: frozenset[str], negated: bool) -> Evaluate:
    def evaluate(lookup: Lookup) -> Value:
        value = lookup(name)
        return None if value is None else (value in texts) is not negated

    return evaluate


def _text_match(match: Match) -> Evaluate:
    text, kind, negated = match.text, match.kind, match.negated
    operand = compile_expression(match.operand)
    if not text:
        return lambda lookup: False

    def evaluate(lookup: Lookup) -> Value:
        value = operand(lookup)
        if not isinstance(value, str):
            return False
        if kind == "CONTAINS":
            return (text in value) is not negated
        found = value.startswith(text) if kind == "STARTSWITH" else value.endswith(text)
        return found is not negated

    return evaluate

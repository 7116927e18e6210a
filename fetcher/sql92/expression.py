"""What a SQL92 filter says, as a tree of values.

Owns the vocabulary. Does not own how it is written (parser.py) nor what it means (evaluation.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


class Long(int):
    """A Java Long. A plain int is an Integer, a float a Double: the broker compares them differently with text."""


Value = str | bool | int | float | None
"""What a term evaluates to. None is unknown: a property that the message does not have."""

ComparisonSign = Literal["=", ">", ">=", "<", "<="]
MatchKind = Literal["CONTAINS", "STARTSWITH", "ENDSWITH"]


@dataclass(frozen=True)
class Constant:
    """A literal."""

    value: Value


@dataclass(frozen=True)
class Property:
    """A message property, always text."""

    name: str


@dataclass(frozen=True)
class Negate:
    """Minus. Unknown for anything but a number."""

    operand: Expression


@dataclass(frozen=True)
class Truth:
    """A property used as a condition: text is never true."""

    operand: Property


@dataclass(frozen=True)
class Not:
    """Logical not; unknown stays unknown."""

    operand: Expression


@dataclass(frozen=True)
class And:
    """All terms, judged from left to right."""

    terms: tuple[Expression, ...]


@dataclass(frozen=True)
class Or:
    """Any term, judged from left to right."""

    terms: tuple[Expression, ...]


@dataclass(frozen=True)
class Comparison:
    """Two values compared. ``=`` with the constant NULL is how IS NULL is put."""

    sign: ComparisonSign
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Among:
    """IN: a property is one of these texts, or with ``negated`` none of them."""

    operand: Property
    texts: frozenset[str]
    negated: bool


@dataclass(frozen=True)
class Match:
    """CONTAINS, STARTSWITH, ENDSWITH (since RocketMQ 5.2): never unknown, and false for what is not a text."""

    kind: MatchKind
    operand: Expression
    text: str
    negated: bool


Expression = Constant | Property | Negate | Truth | Not | And | Or | Comparison | Among | Match

CONDITIONS: Final = (Truth, Not, And, Or, Comparison, Among, Match)
"""Nodes that are true, false or unknown."""


def is_condition(expression: Expression) -> bool:
    """Whether it may stand where a condition must: not numbers, texts, properties (BooleanExpression in Java)."""
    if isinstance(expression, Constant):
        return expression.value is None or isinstance(expression.value, bool)
    return isinstance(expression, CONDITIONS)

"""What a SQL92 filter says, as a tree of values, and what it means: each compiles to a function of a message's
properties with the result true, false or unknown.

Owns the vocabulary and the three-valued logic. A comparison that fails (text that is no number) fails the whole filter,
unless what stands before it has decided already, as in the broker. Does not own how it is written (parser.py). Source:
the evaluate methods in org.apache.rocketmq.filter.expression.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from fetcher.sql92.java_values import Long, Value, compare, compare_doubles, to_double

Lookup = Callable[[str], str | None]
"""A message: the text of a property, None when it has none of that name."""
Evaluate = Callable[[Lookup], Value]
"""Raises ValueClashError where the broker's would throw."""
ComparisonSign = Literal["=", ">", ">=", "<", "<="]
MatchKind = Literal["CONTAINS", "STARTSWITH", "ENDSWITH"]
_ORDERINGS: Final[dict[str, Callable[[int, int], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Expression(Protocol):
    """A term of a filter."""

    def compiled(self) -> Evaluate:
        """A function that evaluates it."""
        ...


@dataclass(frozen=True)
class Constant:
    """A literal."""

    value: Value

    def compiled(self) -> Evaluate:
        value = self.value
        return lambda lookup: value


@dataclass(frozen=True)
class Property:
    """A message property, always text."""

    name: str

    def compiled(self) -> Evaluate:
        name = self.name
        return lambda lookup: lookup(name)


@dataclass(frozen=True)
class Negate:
    """Minus. Unknown for anything but a number."""

    operand: Expression

    def compiled(self) -> Evaluate:
        """A function that negates the operand's number; None (unknown) if the operand is no number. A Long stays a
        Long, which keeps Java's range."""
        operand = self.operand.compiled()

        def evaluate(lookup: Lookup) -> Value:
            value = operand(lookup)
            if value is None or isinstance(value, str | bool):
                return None
            return Long(-value) if isinstance(value, Long) else -value

        return evaluate


@dataclass(frozen=True)
class Truth:
    """A property used as a condition: text is never true."""

    operand: Property

    def compiled(self) -> Evaluate:
        name = self.operand.name
        return lambda lookup: None if lookup(name) is None else False


@dataclass(frozen=True)
class Not:
    """Logical not; unknown stays unknown."""

    operand: Expression

    def compiled(self) -> Evaluate:
        """A function that negates the operand's truth value; None (unknown) stays None."""
        operand = self.operand.compiled()

        def evaluate(lookup: Lookup) -> Value:
            value = operand(lookup)
            return None if value is None else not value

        return evaluate


@dataclass(frozen=True)
class And:
    """All terms, judged from left to right."""

    terms: tuple[Expression, ...]

    def compiled(self) -> Evaluate:
        return _junction(self.terms, decisive=False)


@dataclass(frozen=True)
class Or:
    """Any term, judged from left to right."""

    terms: tuple[Expression, ...]

    def compiled(self) -> Evaluate:
        return _junction(self.terms, decisive=True)


def _junction(terms: tuple[Expression, ...], *, decisive: bool) -> Evaluate:
    """A function that evaluates AND or OR over ``terms``. ``decisive`` is the value that decides as soon as one term
    has it, so that later terms are not evaluated: False for AND, True for OR."""
    judges = [term.compiled() for term in terms]

    def evaluate(lookup: Lookup) -> Value:
        """The decisive value if one term has it, else None (unknown) if a term is unknown, else the other value."""
        outcome: Value = not decisive
        for judge in judges:
            value = judge(lookup)
            if value is decisive:
                return decisive
            if value is None:
                outcome = None
        return outcome

    return evaluate


@dataclass(frozen=True)
class Comparison:
    """Two values compared. ``=`` with the constant NULL is how IS NULL is put."""

    sign: ComparisonSign
    left: Expression
    right: Expression

    def compiled(self) -> Evaluate:
        left, right = self.left.compiled(), self.right.compiled()
        return _equality(left, right) if self.sign == "=" else _ordering(_ORDERINGS[self.sign], left, right)


def _equality(left: Evaluate, right: Evaluate) -> Evaluate:
    """A function that compares two values for equality as the broker does: NULL equals NULL, two texts are compared as
    texts, everything else as numbers."""

    def evaluate(lookup: Lookup) -> Value:
        """True or False; None (unknown) if the first value is NULL and the second is not, as in the broker."""
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
    """A function that compares two values by <, <=, > or >=. ``decide`` is the operator: it is applied to the result of
    the comparison (-1, 0 or 1) and 0."""

    def evaluate(lookup: Lookup) -> Value:
        """True or False; None (unknown) if a value is NULL. Two texts are compared as numbers."""
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


@dataclass(frozen=True)
class Among:
    """IN: a property is one of these texts, or with ``negated`` none of them."""

    operand: Property
    texts: frozenset[str]
    negated: bool

    def compiled(self) -> Evaluate:
        """A function that tells whether the property's value is among the texts of IN (with NOT: is not). None
        (unknown) if the message lacks the property, with NOT as well."""
        name, texts, negated = self.operand.name, self.texts, self.negated

        def evaluate(lookup: Lookup) -> Value:
            value = lookup(name)
            return None if value is None else (value in texts) is not negated

        return evaluate


@dataclass(frozen=True)
class Match:
    """CONTAINS, STARTSWITH, ENDSWITH (since RocketMQ 5.2): never unknown, and false for what is not a text."""

    kind: MatchKind
    operand: Expression
    text: str
    negated: bool

    def compiled(self) -> Evaluate:
        """A function that tells whether the operand contains, begins or ends with the text (with NOT: does not). An
        empty text matches no message, with NOT neither, as in the broker."""
        text, kind, negated, operand = self.text, self.kind, self.negated, self.operand.compiled()
        if not text:
            return lambda lookup: False

        def evaluate(lookup: Lookup) -> Value:
            """True or False; an operand that is not a text is False, with NOT as well."""
            value = operand(lookup)
            if not isinstance(value, str):
                return False
            if kind == "CONTAINS":
                return (text in value) is not negated
            found = value.startswith(text) if kind == "STARTSWITH" else value.endswith(text)
            return found is not negated

        return evaluate


CONDITIONS: Final = (Truth, Not, And, Or, Comparison, Among, Match)
"""Nodes that are true, false or unknown."""


def is_condition(expression: Expression) -> bool:
    """Whether it may stand where a condition must: not numbers, texts, properties (BooleanExpression in Java)."""
    if isinstance(expression, Constant):
        return expression.value is None or isinstance(expression.value, bool)
    return isinstance(expression, CONDITIONS)

"""Text of a SQL92 filter -> tree, with the broker's grammar and its refusals, and errors that say where.

    or: and (OR and)*          and: equality (AND equality)*
    equality: comparison ((= | <>) comparison | IS [NOT] NULL)*
    comparison: unary ((> | >= | < | <=) unary | [NOT] BETWEEN unary AND unary
                       | [NOT] IN (string, …) | [NOT] (CONTAINS | STARTSWITH | ENDSWITH) string)*
    unary: (+ | - | NOT) unary | string | number | TRUE | FALSE | NULL | property | ( or )

Reads only the tokens requested: a broker ignores what follows a complete expression. Owns tokens, grammar and checks.
Does not own evaluation (expression.py). Sources: org.apache.rocketmq.filter.parser.SelectorParser,
ComparisonExpression, ConstantExpression.
"""

import math
import re
from typing import Final, NamedTuple, cast

from fetcher.rows.tag_filter import EXPRESSION_CHARS_MAX
from fetcher.sql92.expression import (
    Among,
    And,
    Comparison,
    ComparisonSign,
    Constant,
    Expression,
    Match,
    MatchKind,
    Negate,
    Not,
    Or,
    Property,
    Truth,
    is_condition,
)
from fetcher.sql92.java_values import INT_MAX, LONG_MAX, Long, compare
from tiered.errors import UsageError

KEYWORDS: Final = frozenset(
    ["NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH"]
)
END: Final = "end"
_HINTS: Final = {
    "!": "write <> for unequal",
    '"': "write strings in single quotes",
    "'": "the string has no closing quote",
    ";": "remove it",
    "&": "write AND",
    "|": "write OR",
    "*": "there is no arithmetic in a filter",
    "/": "there is no arithmetic in a filter",
    "%": "there is no arithmetic in a filter",
}

# A comment ends at a line's end; two minus signs in the last line are two minus signs.
_SKIPPED = re.compile(r"(?:[ \t\n\r\f]|--[^\n\r]*[\n\r]|/\*(?:[^*]|\*+[^*/])*\*+/)*")
_TOKEN = re.compile(
    r"""(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)
      | (?P<integer>0|[1-9][0-9]*[lL]?)
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
      | (?P<sign><>|<=|>=|[=<>(),+-])""",
    re.VERBOSE,
)


class Sql92Error(UsageError):
    """The filter is not one. ``position``: character of the expression, from 0."""

    def __init__(self, expression: str, position: int, complaint: str, *, hint: str = "") -> None:
        shown = expression if len(expression) <= 200 else f"{expression[:200]}…"
        super().__init__(f"SQL92 filter {shown!r}: {complaint} at character {position + 1}", hint=hint)
        self.position = position


class Token(NamedTuple):
    """``kind``: float, integer, string, name, end, or the keyword (upper case) or sign itself."""

    kind: str
    text: str
    position: int
    end: int


def token_at(expression: str, position: int) -> Token:
    """The token that begins at or after ``position``, spaces and comments skipped. Raises Sql92Error where no token can
    begin."""
    skipped = _SKIPPED.match(expression, position)
    assert skipped is not None
    begin = skipped.end()
    if begin == len(expression):
        return Token(END, "the end", begin, begin)
    found = _TOKEN.match(expression, begin)
    if found is None:
        character = expression[begin]
        raise Sql92Error(
            expression, begin, f"{character!r} is not expected here", hint=_HINTS.get(character, "")
        )
    kind, text = str(found.lastgroup), found.group()
    if kind == "name" and text.upper() in KEYWORDS:
        kind = text.upper()
    elif kind == "sign":
        kind = text
    return Token(kind, text, begin, found.end())


def string_value(token: Token) -> str:
    """What a string token stands for."""
    return token.text[1:-1].replace("''", "'")


NESTING_MAX: Final = 64
"""Parentheses, NOT, signs and chained comparisons one inside the other. Keeps strangers' filters off the stack."""
TOKENS_MAX: Final = 1024
"""A list of five hundred strings. Bounds the time to parse a filter, and to evaluate it on one message."""
CONTAINS_MAX: Final = 32
"""Each one searches a whole property, up to 32 KiB."""
_MATCHES: Final = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_ORDERINGS: Final = (">", ">=", "<", "<=")


def parse(expression: str, *, ignore_rest: bool = False) -> Expression:
    """Parse a filter into a tree. Raises Sql92Error.

    ``ignore_rest``: accept what follows a complete expression and ignore it, as brokers do (``a = 1 LIKE 'x'``).
    """
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise Sql92Error(
            expression, EXPRESSION_CHARS_MAX, f"it has more than {EXPRESSION_CHARS_MAX} characters"
        )
    parser = _Parser(expression)
    begin = parser.token
    tree = parser.condition(parser.disjunction(), begin)
    if not ignore_rest:
        parser.expect_end()
    return tree


class _Parser:
    """Recursive descent over tokens; ``token`` is the next one, not yet taken."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._depth = self._tokens = self._contains = 0
        self.token = token_at(expression, 0)

    def disjunction(self) -> Expression:
        """Parse terms joined by OR. A single term is returned as it is and may be any value; several must each be a
        condition."""
        begin, first = self.token, self._conjunction()
        if self.token.kind != "OR":
            return first
        terms = [self.condition(first, begin)]
        while self._take("OR"):
            begin = self.token
            terms.append(self.condition(self._conjunction(), begin))
        return Or(tuple(terms))

    def _conjunction(self) -> Expression:
        """Parse terms joined by AND. A single term is returned as it is and may be any value; several must each be a
        condition."""
        begin, first = self.token, self._equality()
        if self.token.kind != "AND":
            return first
        terms = [self.condition(first, begin)]
        while self._take("AND"):
            begin = self.token
            terms.append(self.condition(self._equality(), begin))
        return And(tuple(terms))

    def _equality(self) -> Expression:
        """Parse comparisons by =, <> and IS from left to right. Raises Sql92Error for comparisons that the broker
        refuses, such as one of a number with a truth value."""
        begin, left = self.token, self._comparison()
        links = 0
        while self.token.kind in ("=", "<>", "IS"):
            links = self._link(links)
            sign = self._next()
            if sign.kind == "IS":
                negated = self._take("NOT")
                self._expect("NULL")
                left = Comparison("=", left, Constant(None))
            else:
                negated = sign.kind == "<>"
                right_begin = self.token
                right = self._comparison()
                self._refuse_null(left, begin)
                self._refuse_null(right, right_begin)
                if _is_truth_value(left) and isinstance(right, Constant) and not _is_truth_value(right):
                    raise self._error(
                        right_begin, f"{right_begin.text} cannot be compared with a truth value"
                    )
                left = Comparison("=", left, right)
            left = Not(left) if negated else left
        return left

    def _comparison(self) -> Expression:
        """Parse comparisons by size, BETWEEN, IN, CONTAINS, STARTSWITH and ENDSWITH, from left to right."""
        begin, left = self.token, self._unary()
        links = 0
        while self.token.kind in (*_ORDERINGS, *_MATCHES, "BETWEEN", "IN", "NOT"):
            links = self._link(links)
            negated = self._take("NOT")
            operator = self._next()
            if operator.kind in _MATCHES:
                self._contains += operator.kind == "CONTAINS"
                if self._contains > CONTAINS_MAX:
                    raise self._error(operator, f"it has more than {CONTAINS_MAX} CONTAINS")
                text = string_value(self._expect("string"))
                left = Match(cast(MatchKind, operator.kind), left, text, negated)
            elif operator.kind == "BETWEEN":
                left = self._between(left, begin, negated)
            elif operator.kind == "IN":
                left = self._among(left, begin, negated)
            elif negated:
                raise self._error(
                    operator, f"{operator.text} cannot follow NOT", hint="put NOT before the whole comparison"
                )
            else:
                right_begin = self.token
                left = self._ordering(operator.kind, (left, begin), (self._unary(), right_begin))
        return left

    def _between(self, value: Expression, begin: Token, negated: bool) -> Expression:
        """Parse what follows BETWEEN, and return it as two comparisons of ``value``. Two constants in the wrong order
        raise Sql92Error, as in the broker, which accepts them in NOT BETWEEN, however."""
        low_begin, low = self.token, self._unary()
        self._expect("AND")
        high_begin, high = self.token, self._unary()
        low_sign, high_sign = ("<", ">") if negated else (">=", "<=")
        terms = (
            self._ordering(low_sign, (value, begin), (low, low_begin)),
            self._ordering(high_sign, (value, begin), (high, high_begin)),
        )
        if negated:
            return Or(terms)
        if isinstance(low, Constant) and isinstance(high, Constant) and compare(high.value, low.value) < 0:
            raise self._error(low_begin, f"nothing is between {low_begin.text} and {high_begin.text}")
        return And(terms)

    def _among(self, operand: Expression, begin: Token, negated: bool) -> Among:
        """Parse the list that follows IN, whose items are texts. Raises Sql92Error if ``operand``, which stands before
        IN, is not a property."""
        if not isinstance(operand, Property):
            raise self._error(begin, "only a property can be IN a list")
        self._expect("(")
        texts = [string_value(self._expect("string"))]
        while self._take(","):
            texts.append(string_value(self._expect("string")))
        self._expect(")")
        return Among(operand, frozenset(texts), negated)

    def _ordering(self, sign: str, *operands: tuple[Expression, Token]) -> Comparison:
        """The comparison of two operands by <, <=, > or >=; each comes with its first token, to which an error points.
        Raises Sql92Error for an operand that cannot be a number."""
        for operand, begin in operands:
            is_number = isinstance(operand, Constant) and _is_number(operand.value)
            if is_condition(operand) or (isinstance(operand, Constant) and not is_number):
                raise self._error(
                    begin,
                    f"{begin.text} is not a number",
                    hint="only numbers can be compared by <, <=, > and >=",
                )
        (left, _), (right, _) = operands
        return Comparison(cast(ComparisonSign, sign), left, right)

    def _unary(self) -> Expression:
        """Parse a value with the signs and NOTs in front of it. Raises Sql92Error where it is nested too deep, because
        each level is a call and a client chooses the text."""
        self._depth += 1
        if self._depth > NESTING_MAX:
            raise self._error(self.token, f"it is nested more than {NESTING_MAX} deep")
        try:
            if self._take("+"):
                return self._unary()
            if self._take("-"):
                return Negate(self._unary())
            if self._take("NOT"):
                begin = self.token
                return Not(self.condition(self._unary(), begin))
            return self._primary()
        finally:
            self._depth -= 1

    def _primary(self) -> Expression:
        """Parse a constant, a property, or an expression in parentheses."""
        token = self._next()
        match token.kind:
            case "string":
                return Constant(string_value(token))
            case "integer":
                return Constant(self._integer(token))
            case "float":
                return Constant(self._double(token))
            case "TRUE" | "FALSE":
                return Constant(token.kind == "TRUE")
            case "NULL":
                return Constant(None)
            case "name":
                return Property(token.text)
            case "(":
                inner = self.disjunction()
                self._expect(")")
                return inner
        raise self._error(token, f"a value was expected, not {token.text}")

    def _integer(self, token: Token) -> int:
        digits = token.text.rstrip("lL")
        if len(digits) > len(str(LONG_MAX)) or int(digits) > LONG_MAX:
            raise self._error(token, f"{digits[:30]} is more than {LONG_MAX}")
        value = int(digits)
        return value if value <= INT_MAX else Long(value)

    def _double(self, token: Token) -> float:
        """The value of a number with a fraction or an exponent. Raises Sql92Error for numbers that brokers refuse."""
        value = float(token.text)
        if not math.isfinite(value):
            raise self._error(token, f"{token.text[:30]} is larger than any number")
        if value == 0:
            # The broker refuses 0.0, which it takes for a number that is too small to be represented.
            raise self._error(token, f"{token.text[:30]} is a number that brokers refuse", hint="write 0")
        return value

    def condition(self, expression: Expression, begin: Token) -> Expression:
        """``expression`` where a condition must stand. Raises Sql92Error when it is none."""
        if isinstance(expression, Property):
            return Truth(expression)
        if not is_condition(expression):
            raise self._error(begin, f"a condition was expected, not {begin.text}")
        return expression

    def expect_end(self) -> None:
        """Refuse what follows, but for a comment in the last line."""
        if self.token.kind != END and not self._expression.startswith("--", self.token.position):
            hint = "put strings in single quotes and join conditions by AND or OR"
            raise self._error(self.token, f"the expression is complete before {self.token.text}", hint=hint)

    def _refuse_null(self, operand: Expression, begin: Token) -> None:
        if operand == Constant(None):
            raise self._error(begin, "NULL cannot be compared", hint="write IS NULL or IS NOT NULL")

    def _link(self, links: int) -> int:
        if links >= NESTING_MAX:
            raise self._error(self.token, f"more than {NESTING_MAX} comparisons in one chain")
        return links + 1

    def _next(self) -> Token:
        """Take the next token. Raises Sql92Error at the end of the text, or if it has too many tokens, because any
        client can send a filter."""
        taken = self.token
        if taken.kind == END:
            raise self._error(taken, "a value was expected, not the end")
        self._tokens += 1
        if self._tokens > TOKENS_MAX:
            raise self._error(taken, f"it has more than {TOKENS_MAX} names, values and operators")
        self.token = token_at(self._expression, taken.end)
        return taken

    def _take(self, kind: str) -> bool:
        if self.token.kind != kind:
            return False
        self._next()
        return True

    def _expect(self, kind: str) -> Token:
        if self.token.kind != kind:
            wanted = "a string in single quotes" if kind == "string" else kind
            raise self._error(self.token, f"{wanted} was expected, not {self.token.text}")
        return self._next()

    def _error(self, token: Token, complaint: str, *, hint: str = "") -> Sql92Error:
        return Sql92Error(self._expression, token.position, complaint, hint=hint)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_truth_value(expression: Expression) -> bool:
    return isinstance(expression, Constant) and (
        expression.value is None or isinstance(expression.value, bool)
    )

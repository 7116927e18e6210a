"""Words of a SQL92 filter, with where they stand.

Owns what a token is. Reads only the tokens requested: a broker ignores what follows a complete expression.
Source: the tokens of org.apache.rocketmq.filter.parser.SelectorParser.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

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
    """The next token from ``position`` on. Raises Sql92Error where none can begin."""
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

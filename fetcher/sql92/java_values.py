"""Numbers and comparisons as Java has them, where text meets numbers.

A property is text. Beside an Integer it must be a whole number of 32 bits, beside a Double any number; what is not
makes the comparison fail, and with it the filter (a message that makes it fail does not match). Sources:
ComparisonExpression.__compare, Integer.valueOf, Long.valueOf, Double.valueOf, Double.compareTo, Boolean.valueOf.
"""

import math
import re
from typing import Final

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
_WHOLE = re.compile(r"[+-]?\d+")
_DOUBLE = re.compile(
    r"(?P<plain>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?"
    r"|(?P<hex>[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
    r"|(?P<word>[+-]?(?:NaN|Infinity))"
)
NUMBER_CHARS_MAX: Final = 128
"""A longer text is no number: a filter may read a property's 32 KiB as one a thousand times. Java has no limit."""
_SHORT_DIGITS: Final = 9
"""Numbers of up to so many digits fit an Integer."""
_TRIMMED: Final = "".join(map(chr, range(33)))


class Long(int):
    """A Java Long. A plain int is an Integer, a float a Double: the broker compares them differently with text."""


Value = str | bool | int | float | None
"""What a term evaluates to. None is unknown: a property that the message does not have."""


class ValueClashError(Exception):
    """Two values cannot be compared: the filter as a whole fails on this message."""


def to_integer(text: str, bound: int) -> int:
    """Integer.valueOf with ``bound`` INT_MAX, Long.valueOf with LONG_MAX."""
    if len(text) <= _SHORT_DIGITS and text.isascii() and text.isdigit():
        return int(text)
    # Java reads digits of any script, but none beyond the basic plane.
    if (
        len(text) > NUMBER_CHARS_MAX
        or _WHOLE.fullmatch(text) is None
        or (not text.isascii() and max(text) > "\uffff")
    ):
        raise ValueClashError(text)
    digits = text.lstrip("+-").lstrip("0")
    value = int(text) if len(digits) <= len(str(LONG_MAX)) else bound + 2
    if not -bound - 1 <= value <= bound:
        raise ValueClashError(text)
    return value


def to_double(text: str) -> float:
    """Double.valueOf: control characters and spaces around it do not count; hexadecimal and suffixes do."""
    found = _DOUBLE.fullmatch(text.strip(_TRIMMED)) if len(text) <= NUMBER_CHARS_MAX else None
    if found is None:
        raise ValueClashError(text)
    if found["hex"] is None:
        return float(found["plain"] or found["word"])
    try:
        return float.fromhex(found["hex"])
    except OverflowError:
        return -math.inf if text.lstrip(_TRIMMED).startswith("-") else math.inf


def to_boolean(text: str) -> bool:
    """Boolean.valueOf."""
    return len(text) == 4 and text.lower() == "true"


def compare(left: Value, right: Value) -> int:
    """Negative, 0 or positive. Raises ValueClashError where Java throws.

    Values of kinds that never compare are -1, whichever comes first. None must not be given.
    """
    if isinstance(left, bool):
        return _compare_boolean(left, right)
    if isinstance(left, str):
        return _compare_text(left, right)
    if isinstance(right, str):
        right = _converted(right, left)
    if isinstance(right, bool | str) or left is None or right is None:
        return -1
    if isinstance(left, float) or isinstance(right, float):
        return compare_doubles(float(left), float(right))
    return (left > right) - (left < right)


def compare_doubles(left: float, right: float) -> int:
    """Double.compareTo: NaN equals itself and is above all, -0.0 is below 0.0."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        return int(math.copysign(1, left) - math.copysign(1, right)) // 2 if left == 0 else 0
    return math.isnan(left) - math.isnan(right)


def _compare_boolean(left: bool, right: Value) -> int:
    if isinstance(right, str):
        raise ValueClashError(right)  # Java casts the boolean to a String
    return left - right if isinstance(right, bool) else -1


def _compare_text(left: str, right: Value) -> int:
    if isinstance(right, str):
        return (left > right) - (left < right)
    if isinstance(right, bool):
        return to_boolean(left) - right
    return compare(_converted(left, right), right)


def _converted(text: str, like: Value) -> Value:
    """``text`` as the kind of number that ``like`` is."""
    if isinstance(like, float):
        return to_double(text)
    return to_integer(text, LONG_MAX if isinstance(like, Long) else INT_MAX)

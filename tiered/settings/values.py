"""Parses and checks the value of a setting: integers with units, booleans, lists, limits. Pure."""

import json
from typing import Any

from tiered.settings.declaration import SettingField
from tiered.settings.quantities import (
    SIZE_UNITS,
    TIME_MS_MAX,
    TIME_UNITS_MS,
    WHOLE_MAX,
    BadValueError,
    whole_amount,
)
from tiered.settings.rule_entries import RuleEntry, parse_rules

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def parse_value(item: SettingField, written: Any) -> Any:
    """The value of the setting ``item`` that a user has ``written``, in TOML or as text, in the setting's type. Raises
    BadValueError for a value that is no such type or outside of its limits."""
    return _checked(item, _CONVERTERS[item.type](item, written))


def _integer(item: SettingField, written: Any) -> int:
    """The value of a whole number, such as 5000, or of text with a unit, such as "5s", in the unit that the setting's
    name ends in. Raises BadValueError for anything else."""
    if isinstance(written, bool) or not isinstance(written, int | str):
        raise BadValueError(_expectation(item))
    if isinstance(written, int):
        return written
    amount = whole_amount(written, _units_of(item.name))
    if amount is None:
        raise BadValueError(_expectation(item))
    return amount


def _units_of(name: str) -> dict[str, int]:
    if name.endswith(("_bytes", "_bytes_per_s")):
        return SIZE_UNITS
    return TIME_UNITS_MS if name.endswith("_ms") else {"": 1}


def _number(item: SettingField, written: Any) -> float:
    """The value of a setting that is a fraction, from a number or its text. Raises BadValueError for anything else."""
    if isinstance(written, bool):
        raise BadValueError(_expectation(item))
    try:
        return float(written)
    except (TypeError, ValueError, OverflowError):
        raise BadValueError(_expectation(item)) from None


def _boolean(item: SettingField, written: Any) -> bool:
    if isinstance(written, bool):
        return written
    text = written.strip().lower() if isinstance(written, str) else ""
    if text not in _TRUE | _FALSE:
        raise BadValueError(_expectation(item))
    return text in _TRUE


def _text(item: SettingField, written: Any) -> str:
    if not isinstance(written, str):
        raise BadValueError(_expectation(item))
    return written


def _texts(item: SettingField, written: Any) -> tuple[str, ...]:
    texts = _split_list(item, written) if isinstance(written, str) else written
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise BadValueError(_expectation(item))
    return tuple(texts)


def _split_list(item: SettingField, written: str) -> Any:
    """A list that was written as one text, of an environment variable or a flag: JSON, or values with commas between
    them. Raises BadValueError for invalid JSON."""
    if not written.lstrip().startswith("["):
        return [text.strip() for text in written.split(",") if text.strip()]
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        raise BadValueError(_expectation(item)) from None


_CONVERTERS: dict[Any, Any] = {
    int: _integer,
    float: _number,
    bool: _boolean,
    str: _text,
    tuple[str, ...]: _texts,
    tuple[RuleEntry, ...]: lambda _, written: parse_rules(written),
}


def _checked(item: SettingField, value: Any) -> Any:
    """``value`` if the setting ``item`` may have it. Raises BadValueError if its choices or limits do not allow it."""
    rule = item.rule
    if rule.choices and value not in rule.choices:
        raise BadValueError(f"use one of {', '.join(rule.choices)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        too_small = rule.minimum is not None and value < rule.minimum
        too_large = rule.maximum is not None and not value <= rule.maximum  # refuses NaN
        if too_small or too_large:
            raise BadValueError(f"use {limits(item)}")
        most = TIME_MS_MAX if item.name.endswith("_ms") else WHOLE_MAX
        if isinstance(value, int) and value > most:
            raise BadValueError(f"use a value of at most {most}")
    return value


def limits(item: SettingField) -> str:
    """The values that the setting ``item`` may have, in words; empty if it has no limits. Also for its
    documentation."""
    low, high = item.rule.minimum, item.rule.maximum
    if low is not None and high is not None:
        return (
            f"a value from {low:g} to {high:g}" if isinstance(low, float) else f"a value from {low} to {high}"
        )
    if low is not None:
        return f"a value of at least {low}"
    return f"a value of at most {high}" if high is not None else ""


def _expectation(item: SettingField) -> str:
    """What to write as the value of the setting ``item``, for the hint of an error."""
    if item.type is int:
        if _units_of(item.name) is SIZE_UNITS:
            return 'use a whole number of bytes, or text such as "32MiB"'
        if _units_of(item.name) is TIME_UNITS_MS:
            return 'use a whole number of milliseconds, or text such as "5s"'
        return "use a whole number"
    words = {
        float: "use a number",
        bool: "use true or false",
        str: "use text",
        tuple[str, ...]: 'use a list of strings, such as ["orders-*"]',
    }
    return words[item.type]

"""Parses and checks the value of a setting: integers with units, booleans, lists, limits. Pure."""

from __future__ import annotations

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


def parse_value(item: SettingField, raw: Any) -> Any:
    """``raw`` (from TOML, or text) as the setting's type and within its limits. Raises BadValueError."""
    return _checked(item, _CONVERTERS[item.type](item, raw))


def _integer(item: SettingField, raw: Any) -> int:
    """A whole number, or text with a unit, as the setting's base unit. Raises BadValueError."""
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise BadValueError(_expectation(item))
    if isinstance(raw, int):
        return raw
    amount = whole_amount(raw, _units_of(item.name))
    if amount is None:
        raise BadValueError(_expectation(item))
    return amount


def _units_of(name: str) -> dict[str, int]:
    if name.endswith(("_bytes", "_bytes_per_s")):
        return SIZE_UNITS
    return TIME_UNITS_MS if name.endswith("_ms") else {"": 1}


def _number(item: SettingField, raw: Any) -> float:
    if isinstance(raw, bool):
        raise BadValueError(_expectation(item))
    try:
        return float(raw)
    except (TypeError, ValueError, OverflowError):
        raise BadValueError(_expectation(item)) from None


def _boolean(item: SettingField, raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    text = raw.strip().lower() if isinstance(raw, str) else ""
    if text not in _TRUE | _FALSE:
        raise BadValueError(_expectation(item))
    return text in _TRUE


def _text(item: SettingField, raw: Any) -> str:
    if not isinstance(raw, str):
        raise BadValueError(_expectation(item))
    return raw


def _texts(item: SettingField, raw: Any) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = _split_list(item, raw)
    if not isinstance(raw, list | tuple) or not all(isinstance(part, str) for part in raw):
        raise BadValueError(_expectation(item))
    return tuple(raw)


def _split_list(item: SettingField, raw: str) -> Any:
    if not raw.lstrip().startswith("["):
        return [part.strip() for part in raw.split(",") if part.strip()]
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise BadValueError(_expectation(item)) from None


_CONVERTERS: dict[Any, Any] = {
    int: _integer,
    float: _number,
    bool: _boolean,
    str: _text,
    tuple[str, ...]: _texts,
    tuple[RuleEntry, ...]: lambda _, raw: parse_rules(raw),
}


def _checked(item: SettingField, value: Any) -> Any:
    """Returns ``value``. Raises BadValueError if the setting does not allow it, by its choices or its limits."""
    rule = item.rule
    if rule.choices and value not in rule.choices:
        raise BadValueError(f"use one of {', '.join(rule.choices)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        too_small = rule.minimum is not None and value < rule.minimum
        too_large = rule.maximum is not None and not value <= rule.maximum  # refuses NaN
        if too_small or too_large:
            raise BadValueError(f"use {limits(item)}")
        if isinstance(value, int) and value > (most := _whole_max(item.name)):
            raise BadValueError(f"use a value of at most {most}")
    return value


def _whole_max(name: str) -> int:
    """The largest integer of this unit."""
    return TIME_MS_MAX if name.endswith("_ms") else WHOLE_MAX


def limits(item: SettingField) -> str:
    """The allowed range in words; empty without limits."""
    low, high = item.rule.minimum, item.rule.maximum
    if low is not None and high is not None:
        return (
            f"a value from {low:g} to {high:g}" if isinstance(low, float) else f"a value from {low} to {high}"
        )
    if low is not None:
        return f"a value of at least {low}"
    return f"a value of at most {high}" if high is not None else ""


def _expectation(item: SettingField) -> str:
    """What a value of the setting looks like, for the hint of an error."""
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

"""Option texts as typed values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from tiered.errors import UsageError
from tiered.timestamps import parse_instant

E = TypeVar("E", bound=Enum)


class OptionTexts:
    """Typed values of options, by their names. Raises UsageError for an impossible one."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        """Names are in lower case."""

    def names(self, name: str) -> tuple[str, ...]:
        """Items of a list with commas."""
        items = (item.strip() for item in self._options.get(name.lower(), "").split(","))
        return tuple(item for item in items if item)

    def regex(self, name: str) -> str:
        """A regular expression."""
        text = self._options.get(name.lower(), "")
        try:
            re.compile(text)
        except re.error as error:
            raise UsageError(f"{name} {text} is not a regular expression: {error}") from error
        return text

    def number(self, name: str, minimum: int, maximum: int | None = None) -> int | None:
        """A whole number."""
        text = self._options.get(name.lower())
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise UsageError(f"{name} is {text}", hint=f"use a whole number {bounds}")
        return value

    def instant(self, name: str) -> int | None:
        """A time in ms since the epoch."""
        text = self._options.get(name.lower())
        if text is None:
            return None
        try:
            return parse_instant(text)
        except UsageError as error:
            raise UsageError(f"{name}: {error.message}") from error

    def flag(self, name: str, *, default: bool) -> bool:
        """``true`` or ``false``."""
        text = self._options.get(name.lower(), str(default)).lower()
        if text not in ("true", "false"):
            raise UsageError(f"{name} is {text}", hint="use true or false")
        return text == "true"

    def choice(self, name: str, kind: type[E], default: E) -> E:
        """A member of an enumeration, by its value."""
        text = self._options.get(name.lower())
        if text is None:
            return default
        choices = {str(choice.value).lower(): choice for choice in kind}
        if text.lower() in choices:
            return choices[text.lower()]
        names = ", ".join(str(choice.value) for choice in kind)
        raise UsageError(f"{name} is {text}", hint=f"use one of {names}")

    def document(self, name: str, kind: type[Any], hint: str) -> Any:
        """A JSON value of this Python type, None if the option is not given."""
        text = self._options.get(name.lower())
        if text is None:
            return None
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, kind):
            raise UsageError(f"{name} is not {'a JSON list' if kind is list else 'JSON'}: {text}", hint=hint)
        return found

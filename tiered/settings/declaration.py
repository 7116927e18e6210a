"""How one setting is declared: default, meaning, limits. Owns the `setting` declaration and reading it back.

Does not own which settings exist (sections.py) nor where values come from (load.py).
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_type_hints


@dataclass(frozen=True)
class FieldRule:
    """What is known about a setting besides its type. ``minimum``/``maximum`` are inclusive."""

    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    restart: bool = False
    """A change needs a new process; SIGHUP reports it instead of applying it."""
    live: bool = False
    """A change is in force at once and leaves the uploader alone."""


def setting(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    restart: bool = False,
    live: bool = False,
) -> Any:
    """A dataclass field that knows its meaning and limits. The unit is the last word of the field's name."""
    rule = FieldRule(meaning, minimum, maximum, choices, restart, live)
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class SettingField:
    """One declared setting, ready for a loader or a document."""

    section: str
    name: str
    type: Any
    default: Any
    rule: FieldRule

    @property
    def key(self) -> str:
        """``section.name``, as written in messages and ``--set``."""
        return f"{self.section}.{self.name}"

    @property
    def environment(self) -> str:
        """The environment variable that sets it."""
        return f"TIERED_{self.section.upper()}__{self.name.upper()}"


def declared(section: str, component: type[Any]) -> list[SettingField]:
    """The settings of one component, in the order they are declared."""
    types = get_type_hints(component)
    return [
        SettingField(section, item.name, types[item.name], _default_of(item), item.metadata["rule"])
        for item in fields(component)
    ]


def _default_of(item: Field[Any]) -> Any:
    if item.default is MISSING:
        raise TypeError(f"setting {item.name} has no default")
    return item.default

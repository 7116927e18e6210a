"""The declaration of a setting: default, description, limits."""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_type_hints


@dataclass(frozen=True)
class FieldRule:
    """Description and limits of a setting. ``minimum`` and ``maximum`` are inclusive."""

    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    restart: bool = False
    """A change needs a restart; SIGHUP reports it."""
    live: bool = False
    """A change applies at once, without restarting the uploader."""


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
    """A dataclass field that users can set. The unit is the last word of the field's name."""
    rule = FieldRule(meaning, minimum, maximum, choices, restart, live)
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True)
class SettingField:
    """A declared setting."""

    section: str
    name: str
    type: Any
    default: Any
    rule: FieldRule

    @property
    def key(self) -> str:
        """``section.name``, as in messages and ``--set``."""
        return f"{self.section}.{self.name}"


def declared(section: str, component: type[Any]) -> list[SettingField]:
    """The settings of one component, in order of declaration; constants are skipped."""
    types = get_type_hints(component)
    return [
        SettingField(section, item.name, types[item.name], _default_of(item), item.metadata["rule"])
        for item in fields(component)
        if "rule" in item.metadata
    ]


def _default_of(item: Field[Any]) -> Any:
    if item.default is MISSING:
        raise TypeError(f"setting {item.name} has no default")
    return item.default

"""The declaration of a setting: default, description, limits."""

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
    """A field of a settings dataclass that users can set, with its description (``meaning``) and inclusive limits; the
    last word of the field's name is its unit. ``restart``: a change applies only after a restart of the process;
    ``live``: it applies at once. A change of any other setting restarts the uploader inside the process."""
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
    """The settings of the dataclass ``component``, whose section of the settings file is ``section``, in the order of
    their declaration. Plain fields, which users cannot set, are skipped."""
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

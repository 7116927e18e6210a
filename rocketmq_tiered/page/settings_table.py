"""Renders the settings in effect and their sources. Secrets are in files, whose paths are the settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from rocketmq_tiered.page.html import CELL_CHARS, Child, Html, section, table, tag
from tiered.console import counted
from tiered.settings.declaration import SettingField
from tiered.settings.load import FIELDS, LoadedSettings, value_of
from tiered.settings.sections import SECTIONS, Settings


class CurrentSettings:
    """``read``: loads the settings again."""

    def __init__(self, loaded: LoadedSettings, read: Callable[[], LoadedSettings] | None = None) -> None:
        self._loaded, self._read, self._newest = loaded, read, loaded

    @property
    def loaded(self) -> LoadedSettings:
        """The settings in effect."""
        return self._loaded

    @property
    def settings(self) -> Settings:
        """Their values."""
        return self._loaded.settings

    def reload(self) -> LoadedSettings:
        """Load again; they are in effect once ``apply`` is called. Raises what loading raises."""
        assert self._read is not None
        self._newest = self._read()
        return self._newest

    def apply(self, settings: Settings) -> None:
        """``settings`` are in effect: those loaded last, but for the ones that need a restart."""
        self._loaded = LoadedSettings(settings, self._newest.origins)


HEADER = ("Setting", "Value", "From", "Meaning")


def render_settings(loaded: LoadedSettings) -> Html:
    """The page: first what is not the default, then all by section."""
    chosen = [item for key, item in FIELDS.items() if key in loaded.origins]
    parts: list[Child] = [
        section(
            "set",
            "Set here",
            _table("Settings that are not the default", chosen, loaded)
            if chosen
            else tag("p", "All settings have their default."),
            is_live=False,
        )
    ]
    groups = [
        tag(
            "details",
            tag("summary", f"[{name}]", tag("small", counted(len(items), "setting"))),
            _table(f"Settings of {name}", items, loaded),
        )
        for name in SECTIONS
        if (items := [item for item in FIELDS.values() if item.section == name])
    ]
    parts.append(section("all", "All settings", groups, is_live=False))
    return tag("div", parts, class_="grid")


def _table(caption: str, items: Sequence[SettingField], loaded: LoadedSettings) -> Html:
    rows = [
        (
            tag("code", item.key),
            _value(value_of(loaded.settings, item.key)),
            loaded.origins.get(item.key, "default"),
            [
                tag("span", _meaning(item.rule.meaning), class_="name"),
                tag("small", "needs a restart") if item.rule.restart else None,
            ],
        )
        for item in items
    ]
    return tag("div", table(caption, HEADER, rows), class_="settings")


def _meaning(markdown: str) -> Html:
    """Names in backticks as code, links as their text."""
    parts = re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", markdown).split("`")
    return tag("span", [tag("code", part) if n % 2 else part for n, part in enumerate(parts)], class_="name")


def _value(value: Any) -> Html:
    text = _text(value)
    return tag("code", text, class_="name" if len(text) > CELL_CHARS else None)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value) or "empty"
    return orjson.dumps(value.to_json()).decode()

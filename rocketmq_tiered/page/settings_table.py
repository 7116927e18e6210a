"""Renders the settings in effect and their sources. Secrets are in files, whose paths are the settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rocketmq_tiered.page.html import Child, Html, section, table, tag
from tiered.settings.declaration import SettingField
from tiered.settings.load import FIELDS, LoadedSettings, value_of
from tiered.settings.sections import SECTIONS

HEADER = ("Setting", "Value", "From", "Meaning")


def render_settings(loaded: LoadedSettings) -> Html:
    """The page: first what is not the default, then all by section."""
    chosen = [item for key, item in FIELDS.items() if key in loaded.origins]
    parts: list[Child] = [
        section(
            "set", "Set here", _table("Settings that are not the default", chosen, loaded) if chosen
            else tag("p", "All settings have their default."), is_live=False,
        )
    ]  # fmt: skip
    groups = [
        tag(
            "details", tag("summary", f"[{name}]", tag("small", f"{len(items)} settings")),
            _table(f"Settings of {name}", items, loaded),
        )
        for name in SECTIONS
        if (items := [item for item in FIELDS.values() if item.section == name])
    ]  # fmt: skip
    parts.append(section("all", "All settings", groups, is_live=False))
    return tag("div", parts, class_="grid")


def _table(caption: str, items: Sequence[SettingField], loaded: LoadedSettings) -> Html:
    rows = [
        (
            tag("code", item.key),
            tag("code", _text(value_of(loaded.settings, item.key))),
            loaded.origins.get(item.key, "default"),
            [item.rule.meaning, tag("small", "needs a restart") if item.rule.restart else None],
        )
        for item in items
    ]
    return tag("div", table(caption, HEADER, rows), class_="settings")


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value) or "empty"
    return str(value.to_json())

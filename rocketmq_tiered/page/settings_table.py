"""Renders the settings in effect and their sources. Secrets are in files, whose paths are the settings. Pure."""

import re
from collections.abc import Callable
from typing import Any

import orjson
from markupsafe import Markup

from rocketmq_tiered.page.html import render
from tiered.settings.load import FIELDS, LoadedSettings, value_of
from tiered.settings.sections import SECTIONS, Settings


class CurrentSettings:
    """The settings in effect. ``read``: loads the settings again."""

    def __init__(self, loaded: LoadedSettings, read: Callable[[], LoadedSettings] | None = None) -> None:
        self.loaded, self._read, self._newest = loaded, read, loaded

    @property
    def settings(self) -> Settings:
        """The values of the settings in effect."""
        return self.loaded.settings

    def reload(self) -> LoadedSettings:
        """Load again; they are in effect once ``apply`` is called. Raises what loading raises."""
        assert self._read is not None
        self._newest = self._read()
        return self._newest

    def apply(self, settings: Settings) -> None:
        """Note that ``settings`` are in effect now: those loaded last, except for the ones that need a restart."""
        self.loaded = LoadedSettings(settings, self._newest.origins)


def render_settings(loaded: LoadedSettings) -> Markup:
    """Return the page of settings: first those that differ from the default, then all by section."""
    by_section = [(name, [item for item in FIELDS.values() if item.section == name]) for name in SECTIONS]
    return render(
        "settings",
        chosen=[item for key, item in FIELDS.items() if key in loaded.origins],
        groups=[(name, items) for name, items in by_section if items],
        origins=loaded.origins,
        value_of=lambda key: _text(value_of(loaded.settings, key)),
        meaning=_meaning,
    )


def _meaning(markdown: str) -> list[str]:
    """Text and names in backticks in turn; of links, their text."""
    return re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", markdown).split("`")


def _text(value: Any) -> str:
    """Return a setting's value in one line: lists with commas, a word for an empty list or text, and JSON for a value
    with fields."""
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value) or "empty"
    return orjson.dumps(value.to_json()).decode()

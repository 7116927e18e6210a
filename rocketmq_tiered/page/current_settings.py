"""The settings in effect and the source of each value, also after a reload."""

from __future__ import annotations

from collections.abc import Callable

from tiered.settings.load import LoadedSettings
from tiered.settings.sections import Settings


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

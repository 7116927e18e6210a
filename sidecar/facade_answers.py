"""What a façade answers itself."""

from __future__ import annotations

from fetcher.access import ArchiveAccess
from fetcher.serving.facade.protocol import FacadeHandlers
from fetcher.serving.facade.service import FacadeService
from tiered.settings.sections import ReadSettings


class RelayOnly:
    """Nothing but routes: the broker answers."""

    def __init__(self, access: ArchiveAccess, service: FacadeService) -> None:
        self.handlers: FacadeHandlers = {}

    def apply(self, settings: ReadSettings) -> None:
        """Nothing depends on it."""

    def close(self) -> None:
        """Nothing is open."""

"""Whether a broker was retired: its archive is complete, and nodes may serve it under the broker's name. Pure.

The setting names the epoch that ended with it, so a writer that claims a later one takes the broker back.
"""

from typing import Any, Final

from tiered.catalog.state import CatalogState

RETIRED: Final = "retired"
"""The archive-wide setting with the epoch that ended with the retirement, and its time."""


def retirement(state: CatalogState, now_ms: int) -> dict[str, Any]:
    """Settings of the commit that releases the epoch of ``state`` and retires the broker."""
    return {RETIRED: {"epoch": state.epoch, "since_ms": now_ms}}


def retired_since(state: CatalogState) -> int | None:
    """When the broker was retired, ms since the epoch; None: never, or it has had a writer since."""
    recorded = state.settings.get(RETIRED)
    if not isinstance(recorded, dict) or state.owner is None or not state.owner.released:
        return None
    return int(recorded["since_ms"]) if recorded.get("epoch") == state.epoch else None

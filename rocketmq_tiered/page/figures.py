"""Numbers, sizes, times and money as the page shows them. Pure."""

from __future__ import annotations

from tiered.console import duration_text, size_text, time_text

UNKNOWN = "–"


def count_text(value: float | None) -> str:
    """``12,345``."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def bytes_text(value: float | None) -> str:
    """``1.5 MiB``."""
    return UNKNOWN if value is None else size_text(value)


def seconds_text(value: float | None) -> str:
    """``3m 20s``."""
    return UNKNOWN if value is None else duration_text(value)


def rate_text(value: float | None) -> str:
    """``1,200 /s``."""
    return UNKNOWN if value is None else f"{value:,.0f} /s"


def money_text(value: float | None, currency: str) -> str:
    """``0.12 USD``."""
    if value is None:
        return UNKNOWN
    return f"< 0.01 {currency}" if 0 < value < 0.01 else f"{value:,.2f} {currency}"


def date_text(time_ms: int | None) -> str:
    """``2026-11-23 21:00:00``, UTC."""
    return UNKNOWN if not time_ms else time_text(time_ms).replace("T", " ").removesuffix("Z")


def share_text(part: float, whole: float) -> str:
    """``97.5 %``."""
    return f"{100 * part / whole:.1f} %" if whole else UNKNOWN

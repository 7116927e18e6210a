"""Messages of the real stores that commands archive."""

from __future__ import annotations

MESSAGES = 18_004

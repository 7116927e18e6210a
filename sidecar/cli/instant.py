"""Points in time as arguments of argparse."""

from __future__ import annotations

import argparse

from tiered.errors import UsageError
from tiered.timestamps import parse_instant


def instant(text: str) -> int:
    """Milliseconds since the epoch. Raises ArgumentTypeError, which argparse reports as wrong usage."""
    try:
        return parse_instant(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from error

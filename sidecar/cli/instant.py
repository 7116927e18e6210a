"""Points in time on a command line: milliseconds since the epoch, or ISO 8601.

Owns reading them. Printing is in output.py.
"""

from __future__ import annotations

import argparse
from datetime import datetime

from fetcher.span import milliseconds


def parse_instant(text: str) -> int:
    """Milliseconds since the epoch of ``1795227708020`` or ``2026-11-21T07:00:00.5Z``; without a zone it is UTC.

    Raises ArgumentTypeError, which argparse turns into wrong usage.
    """
    if text.strip().lstrip("-").isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: use milliseconds since 1970, or 2026-11-21T07:00:00Z"
        ) from error
    return milliseconds(moment)

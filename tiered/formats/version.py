"""The version of everything stored: containers, segments and index files have the same one.

docs/FORMATS.md says what a minor version may add; a major version is a last resort.
"""

from __future__ import annotations

from tiered.errors import CorruptionError, UnsupportedFormatError

FORMAT_MAJOR = 1
FORMAT_MINOR = 0


def require_major(major: int, minor: int, what: str) -> None:
    """Raises UnsupportedFormatError for a newer major version, CorruptionError for one that never was. ``what``: an
    object and its version, the begin of the message."""
    if major > FORMAT_MAJOR:
        raise UnsupportedFormatError(f"{what} is newer than {FORMAT_MAJOR}.x", hint="upgrade this program")
    if major < FORMAT_MAJOR:
        raise CorruptionError(f"{what} does not exist")

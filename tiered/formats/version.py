"""The version of everything stored: containers, segments and index files have the same one.

docs/FORMATS.md says what a minor version may add; a major version is a last resort.
"""

from tiered.errors import UnsupportedFormatError

FORMAT_MAJOR = 1
FORMAT_MINOR = 0


def require_major(major: int, minor: int, what: str) -> None:
    """Raise UnsupportedFormatError if this program does not read format ``major``. ``what`` names the object and what
    it is, for the message."""
    if major != FORMAT_MAJOR:
        raise UnsupportedFormatError(
            f"{what} has format {major}.{minor}, and this program reads {FORMAT_MAJOR}.x",
            hint=f"use a version of rocketmq-tiered that reads format {major}.x; nothing was changed",
        )

"""Every error a user or a caller can meet, classified by what the caller does next.

Exit codes of the command line come from the class: 1 anomalies in data, 2 wrong usage or configuration, 3 does not
exist, 4 temporarily unavailable, 5 fenced. "Temporarily unavailable" and "does not exist" are never the same class.
Foreign exceptions (botocore, OSError) are translated where the foreign code is called, nowhere else.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import ClassVar

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Of a system call on a disk without room: StoreFullError."""
DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Of one that is not allowed: AccessDeniedError."""


class TieredError(Exception):
    """Base of all errors raised on purpose. ``hint`` says what to do next, in one line."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class CorruptionError(TieredError):
    """Stored bytes fail a length, checksum or structure check. Names the object or file and the byte range."""


class UsageError(TieredError):
    """The call is wrong: an unknown setting, an impossible value, an ambiguous name."""

    exit_code = 2


class StoreLayoutError(UsageError):
    """A broker store directory has a layout this program refuses (DLedger, unknown)."""


class AccessDeniedError(UsageError):
    """The object store or the file system refuses these credentials. Retrying cannot help."""


class RefusedRequestError(UsageError):
    """The object store calls the request itself wrong (400: region, endpoint, signature, clock skew)."""


class NotFoundError(TieredError):
    """The thing does not exist: bucket, archive, topic, queue, object."""

    exit_code = 3


class UnavailableError(TieredError):
    """Not now: the same call may succeed later."""

    exit_code = 4


class UnreadableError(UnavailableError):
    """The disk does not give bytes of a local file (EIO), named by ``path``. What stands before them may be there."""

    def __init__(self, path: Path, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class ThrottledError(UnavailableError):
    """The store refused the request before doing anything (429, 503, connection refused). Back off."""


class UnansweredError(UnavailableError):
    """The request may or may not have taken effect: time-out, connection lost, 500. Never ask about it."""


class StoreFullError(UnavailableError):
    """The object store's or the local disk's space is used up. A PUT refused so had no effect."""


WITHOUT_EFFECT = (ThrottledError, StoreFullError)
"""What a PUT raises that has certainly left no object: its key is no garbage. Listed, such keys would grow in number as
long as a store refuses."""


class AlreadyExistsError(TieredError):
    """Create-if-absent found the key taken. Internal to the commit protocol; a user never sees it."""


class FencedError(TieredError):
    """Another writer owns a higher epoch: this one stops writing and keeps serving reads."""

    exit_code = 5


class UnsupportedFormatError(UsageError):
    """The object was written by a newer major format than this program reads."""

"""Errors, classified by what the caller does next.

The class gives the exit code: 1 damaged data, 2 usage or configuration, 3 does not exist, 4 temporarily unavailable, 5
fenced. Foreign exceptions (botocore, OSError) are translated only where the foreign code is called.
"""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""System call errors of a full disk: StoreFullError."""
DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""System call errors of missing permissions: AccessDeniedError."""


class TieredError(Exception):
    """Base of all errors. ``hint`` is what to do next, in one line."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class CorruptionError(TieredError):
    """Stored bytes fail a length, checksum or structure check. Names the object or file and the byte range."""


class ArchiveDamagedError(CorruptionError):
    """The newest state of an archive cannot be loaded, or its newest commit is missing: `tiered repair`."""


class CatalogLostError(ArchiveDamagedError):
    """Objects of an archive without any commit: nothing may begin there, and nothing be deleted."""


class UsageError(TieredError):
    """Wrong call: an unknown setting, an invalid value, an ambiguous name."""

    exit_code = 2


class LogDivergedError(UsageError):
    """The broker's log does not continue the archive, and nothing allows to replace it. Not retried at once; the log
    may be put back."""


class StoreLayoutError(UsageError):
    """A broker store directory has an unsupported layout (DLedger, unknown)."""


class AccessDeniedError(UsageError):
    """The object store or the file system refuses these credentials. Not retried."""


class RefusedRequestError(UsageError):
    """The object store rejects the request (400: region, endpoint, signature, clock skew)."""


class ObjectTooLargeError(UsageError):
    """An object is larger than the settings allow a reader to hold. Says nothing about its content."""


class NotFoundError(TieredError):
    """Bucket, archive, topic, queue or object does not exist."""

    exit_code = 3


class NoArchiveError(NotFoundError):
    """There is nothing at the place of an archive: one may begin."""


class MissingBrokerFileError(NotFoundError):
    """A file or directory of the broker does not exist, as when its disk is not mounted."""


class SnapshotExpiredError(NotFoundError):
    """An earlier version of the archive is no longer whole: garbage collection deleted objects that it names."""


class UnavailableError(TieredError):
    """Temporarily unavailable: the same call may succeed later."""

    exit_code = 4


class EmptyCommitlogError(UnavailableError):
    """A commitlog directory has no file though there were some, as when its disk is not mounted."""


class UnreadableError(UnavailableError):
    """The disk cannot read bytes of a local file (EIO), named by ``path``. Earlier bytes may be readable."""

    def __init__(self, path: Path, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class OutOfMemoryError(UnavailableError):
    """Memory does not suffice to decode an object, though it is within its bounds. Names it; says nothing about it."""


class ThrottledError(UnavailableError):
    """The store refused the request without any effect (429, 503, connection refused). Back off."""


class KeyRingAwayError(ThrottledError):
    """What wraps an archive's keys (KMS, a command) is away, throttled or slow: nothing was written."""


class UnansweredError(UnavailableError):
    """The request may or may not have taken effect: timeout, connection lost, 500."""


class StoreFullError(UnavailableError):
    """The object store or the local disk is full. A PUT had no effect."""


WITHOUT_EFFECT = (ThrottledError, StoreFullError)
"""Errors of a PUT that has certainly created no object: its key is no garbage, and must not be collected, as such keys
would accumulate while a store refuses requests."""


class AlreadyExistsError(TieredError):
    """Create-if-absent found an existing key. Internal to the commit protocol."""


class FencedError(TieredError):
    """Another writer owns a higher epoch: this one stops writing and continues to serve reads."""

    exit_code = 5


class UnsupportedFormatError(UsageError):
    """The object has a format that this program does not read. It is not damaged, and nothing may change it."""


class EncryptionKeyError(UnsupportedFormatError):
    """A key that encrypts the object, or the archive, is missing, wrong or refused. Names the key. The object is not
    damaged, and nothing may change it."""

    check: Callable[[], None] = staticmethod(lambda: None)
    """Checks the bytes of the object as they are stored, which needs no key. Raises CorruptionError and the store's
    errors."""
    lacks = ""
    """Which key of an object, whatever object it is."""


class TopicKeyError(EncryptionKeyError):
    """It is the key of a topic with a key of its own: the rest of the archive may be readable."""

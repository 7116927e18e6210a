"""Errors of the local disk that holds temporary files, as the uploader's own errors."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tiered.errors import UnavailableError


@contextmanager
def work_disk(what: str) -> Iterator[None]:
    """Translate errors of the local disk; those of the object store are translated already. ``what`` names what
    is written."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"cannot write {what} in {tempfile.gettempdir()}: {error.strerror or error}",
            hint="free space there, or set TMPDIR",
        ) from error

"""An uploader that stores nothing for too long is ended before its failure is reported."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tiered.errors import UnavailableError
from uploader.bounded_run import OutageLimit, run_bounded
from uploader.offload_status import OffloadResult


def test_nothing_works_on_after_the_failure() -> None:
    """What a thread logged then came after the command's last line."""
    aborted, ended = threading.Event(), threading.Event()
    offloader: Any = SimpleNamespace(
        status=lambda: None, retry_reason="503 SlowDown", abort=lambda _error: aborted.set()
    )

    def offload() -> OffloadResult:
        aborted.wait(20)
        ended.set()
        raise UnavailableError("aborted")

    with pytest.raises(UnavailableError, match="the object store has stored nothing for 0 s: 503 SlowDown"):
        run_bounded(offload, offloader, OutageLimit(0.0, 0.0), threading.Event())
    assert ended.is_set()

"""Column pages decoded by whole arrays: the kernel's answer for every page, well-formed or not."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.formats.column_pages import COLUMNS, KINDS, _encode, _view, page_runs
from tiered.kernels import columns_vectorized
from tiered.kernels.columns import decode_page
from tiered.kernels.columns_vectorized import PageDecoder, decode_page_vectorized
from tiered.kernels.segment_oracle import PageRow, PageRun
from tiered.model.tables import RunKind


def decoded(decode: Any, page: bytes, runs: list[PageRun], first: int, end: int) -> list[NDArray[Any]] | None:
    """The columns, or None for a page that is refused."""
    view = _view(runs)
    columns = [np.empty(end - first, kind) for kind in KINDS]
    data = np.frombuffer(page, np.uint8)
    return columns if decode(data, first, end, view.run_at(first), *view.columns, *columns) else None


def assert_same(page: bytes, runs: list[PageRun], first: int, end: int) -> bool:
    """Both decoders agree; whether they accept the page."""
    expected = decoded(decode_page, page, runs, first, end)
    found = decoded(decode_page_vectorized, page, runs, first, end)
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return False
    for name, mine, theirs in zip(COLUMNS, found, expected, strict=True):
        assert mine.tolist() == theirs.tolist(), name
    return True


@given(page_runs(), st.data())
def test_every_page_decodes_to_what_the_kernel_says(runs: list[PageRun], data: st.DataObject) -> None:
    rows = sum(len(run.rows) for run in runs)
    first = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(first + 1, rows))
    assert assert_same(_encode(runs, first, end), runs, first, end)


@given(page_runs(), st.data())
def test_damaged_pages_are_refused_where_the_kernel_refuses_them(
    runs: list[PageRun], data: st.DataObject
) -> None:
    rows = sum(len(run.rows) for run in runs)
    page = bytearray(_encode(runs, 0, rows))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(page) - 1))
        page[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, page[at] ^ 0x80]))
    cut = data.draw(st.sampled_from([0, 0, 1, 5, len(page)]))
    assert_same(bytes(page[: len(page) - cut]), runs, 0, rows)


@given(st.binary(max_size=80), page_runs())
def test_noise_is_never_taken_for_more_than_the_kernel_takes_it(noise: bytes, runs: list[PageRun]) -> None:
    assert_same(noise, runs, 0, sum(len(run.rows) for run in runs))


BEGIN = (
    "import sys\n"
    "from tests.kernels.test_columns_vectorized import *\n"
    "from tiered.kernels import columns_vectorized\n"
    "from tiered.kernels.columns_vectorized import PageDecoder\n"
    "from tiered.kernels.segment_oracle import PageRow\n"
    "from tiered.model.tables import RunKind\n"
    "runs = [PageRun(int(RunKind.PLAIN), 5, 7, [PageRow(3, 1, 6, 8, 1, -1, -1)])]\n"
    "page = bytes([1, 0, 0, 0] * 4 + [0] * 12 + [6, 2, 2, 2])\n"
    "def decodes():\n"
    "    found = [column.tolist() for column in decoded(decode, page, runs, 0, 1)]\n"
    "    return found == [[3], [1], [6], [8], [1], [-1], [-1]]\n"
)


def assert_runs_alone(script: str) -> None:
    """``script`` after ``BEGIN``, in a process of its own: here numba is loaded."""
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_kernel_takes_over_when_pages_become_many() -> None:
    assert_runs_alone(
        "decode = PageDecoder(pages_without_kernel=2)\n"
        "for _ in range(2):\n"
        "    assert decodes() and 'numba' not in sys.modules and decode.loading is None\n"
        "assert decodes()\n"
        "decode.loading.join()\n"
        "assert 'numba' in sys.modules\n"
        "columns_vectorized.decode_page_vectorized = None\n"
        "assert decodes()\n"
    )


def test_who_asks_has_the_kernel_before_the_first_page() -> None:
    assert_runs_alone(
        "decode = PageDecoder()\n"
        "loading = decode.begin()\n"
        "loading.join()\n"
        "assert decode.begin() is loading\n"
        "columns_vectorized.decode_page_vectorized = None\n"
        "assert decodes()\n"
        "assert len(decode_page.dispatcher().signatures) == 1  # the one for pages as they come\n"
    )


def test_a_process_does_not_end_while_the_kernel_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_vectorized, "decode_page", lambda *_: True)
    decode = PageDecoder()
    of_a_backfill = threading.Thread(target=decode.begin, daemon=True)
    of_a_backfill.start()
    of_a_backfill.join()
    assert decode.loading is not None
    decode.loading.join()
    assert not decode.loading.daemon


def test_nobody_waits_while_the_kernel_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, kernel_pages = threading.Event(), []

    def kernel(*arguments: Any) -> bool:
        if not loads.wait(30):
            raise TimeoutError
        kernel_pages.append(threading.current_thread())
        return decode_page_vectorized(*arguments)

    monkeypatch.setattr(columns_vectorized, "decode_page", kernel)
    runs = [PageRun(int(RunKind.PLAIN), 5, 7, [PageRow(3, 1, 6, 8, 1, -1, -1)])]
    page, decode = _encode(runs, 0, 1), PageDecoder(pages_without_kernel=0)
    expected = decoded(decode_page_vectorized, page, runs, 0, 1)
    for _ in range(5):
        assert decoded(decode, page, runs, 0, 1) == expected
    assert kernel_pages == [] and decode.loading is not None
    loads.set()
    decode.loading.join()
    assert decoded(decode, page, runs, 0, 1) == expected
    assert kernel_pages == [decode.loading, threading.current_thread()]


def test_a_kernel_that_does_not_load_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kernel(*_: Any) -> bool:
        raise ImportError("no numba here")

    monkeypatch.setattr(columns_vectorized, "decode_page", kernel)
    runs = [PageRun(int(RunKind.PLAIN), 5, 7, [PageRow(3, 1, 6, 8, 1, -1, -1)])]
    page, decode = _encode(runs, 0, 1), PageDecoder(pages_without_kernel=0)
    expected = decoded(decode_page_vectorized, page, runs, 0, 1)
    for _ in range(3):
        assert decoded(decode, page, runs, 0, 1) == expected
        assert decode.loading is not None
        decode.loading.join()
    assert caplog.text.count("no numba here") == 1

"""When pages are decoded by numpy and when by the kernel: no page waits for the kernel."""

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.formats.column_pages import KINDS, _encode, _view
from tests.kernels.segment_oracle import PageRow, PageRun
from tiered.formats import page_decoder
from tiered.formats.column_pages import decode_page as decode_by_numpy
from tiered.formats.page_decoder import PageDecoder
from tiered.model.tables import RunKind

_ROWS = [PageRow(3, 1, 6, 8), PageRow(5, -1, 7, 11)]
_RUNS = [PageRun(int(RunKind.PLAIN), 5, 7, _ROWS)]


def _decodes(decode: PageDecoder) -> bool:
    columns: list[Any] = [np.empty(len(_ROWS), kind) for kind in KINDS]
    page = np.frombuffer(_encode(_RUNS, 0, len(_ROWS)), np.uint8)
    assert decode(page, 0, len(_ROWS), 0, *_view(_RUNS).columns, *columns)
    return [PageRow(*map(int, values)) for values in zip(*columns, strict=True)] == _ROWS


def _without_numba(script: str) -> None:
    """Run ``script`` in a process that has not imported numba, with ``page`` and its ``arguments``."""
    page = _encode(_RUNS, 0, len(_ROWS))
    begin = (
        "import sys\n"
        "import numpy as np\n"
        "from tiered.formats import page_decoder\n"
        "from tiered.formats.page_decoder import COLUMN_KINDS, PageDecoder\n"
        f"page = np.frombuffer({page!r}, np.uint8)\n"
        "runs = np.array([0, 2]), np.zeros(1, np.int32), np.array([5]), np.array([7])\n"
        "columns = [np.empty(2, kind) for kind in COLUMN_KINDS]\n"
        "arguments = page, 0, 2, 0, *runs, *columns\n"
    )
    done = subprocess.run([sys.executable, "-c", begin + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_kernel_is_loaded_when_pages_are_many_and_compiled_once() -> None:
    _without_numba(
        "decode = PageDecoder(pages_by_numpy=2)\n"
        "for _ in range(2):\n"
        "    assert decode(*arguments) and 'numba' not in sys.modules and decode.loading is None\n"
        "assert decode(*arguments)\n"
        "decode.loading.join()\n"
        "page_decoder.decode_by_numpy = None\n"
        "assert decode(*arguments) and columns[0].tolist() == [3, 5]\n"
        "assert len(page_decoder.decode_page.wrapped().signatures) == 1\n"
    )


def test_the_kernel_is_loaded_by_the_first_page_beside_other_kernels() -> None:
    _without_numba(
        "import numba\n"
        "decode = PageDecoder()\n"
        "assert decode(*arguments)\n"
        "decode.loading.join()\n"
        "page_decoder.decode_by_numpy = None\n"
        "assert decode(*arguments)\n"
    )


def test_the_kernel_is_never_loaded_where_memory_is_limited() -> None:
    decode = PageDecoder(pages_by_numpy=0)
    decode.may_load = False
    assert _decodes(decode) and decode.loading is None


def test_large_tables_do_not_load_it_there_either() -> None:
    table = "np.zeros(100_000, GAP_DTYPE)"
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from tiered.formats import byte_planes\n"
        "from tiered.formats.page_decoder import decode_column_page\n"
        "from tiered.model.tables import GAP_DTYPE\n"
        "decode_column_page.may_load = False\n"
        f"data = byte_planes.encode({table})\n"
        f"assert (byte_planes.decode(data, 0, 100_000, GAP_DTYPE) == {table}).all()\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_do_not_wait_while_the_kernel_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load, callers = threading.Event(), []

    def kernel(*arguments: Any) -> bool:
        assert may_load.wait(30)
        callers.append(threading.current_thread())
        return decode_by_numpy(*arguments)

    monkeypatch.setattr(page_decoder, "decode_page", kernel)
    decode = PageDecoder(pages_by_numpy=0)
    assert all(_decodes(decode) for _ in range(5))
    assert callers == [] and decode.loading is not None
    may_load.set()
    decode.loading.join()
    assert _decodes(decode)
    assert callers == [decode.loading, threading.current_thread()]


def test_the_kernel_is_loaded_to_the_end_when_a_daemon_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_decoder, "decode_page", lambda *_: True)
    decode = PageDecoder(pages_by_numpy=0)
    reader = threading.Thread(target=_decodes, args=(decode,), daemon=True)
    reader.start()
    reader.join()
    assert decode.loading is not None and not decode.loading.daemon
    decode.loading.join()


def test_pages_are_decoded_by_numpy_if_the_kernel_does_not_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kernel(*_: Any) -> bool:
        raise ImportError("no numba here")

    monkeypatch.setattr(page_decoder, "decode_page", kernel)
    decode = PageDecoder(pages_by_numpy=0)
    for _ in range(3):
        assert _decodes(decode)
        assert decode.loading is not None
        decode.loading.join()
    assert caplog.text.count("no numba here") == 1

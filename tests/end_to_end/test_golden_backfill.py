"""A backfill writes the segments, index files, states and commits that it has always written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.golden_backfill import FILE, STORES, digests
from tests.formats.golden_bytes import needs_golden_zstd


@pytest.mark.parametrize("name", STORES)
def test_a_backfill_writes_what_it_has_always_written(real_store: Callable[[str], Path], name: str) -> None:
    needs_golden_zstd()
    golden = json.loads(FILE.read_text())[name]
    written = digests(real_store(name) / "store")
    assert sorted(written) == sorted(golden)
    assert [key for key in golden if written[key] != golden[key]] == []

"""The broker's tables are written when they changed, whatever is in them, and come back as they were."""

from typing import Any

import pytest

from tiered.errors import CorruptionError
from tiered.formats.state_object import decode_state
from tiered.object_store.memory import MemoryStore
from uploader.broker_state_archive import BrokerStateArchive


@pytest.mark.parametrize("name", ["group", "日志", "half a pair \ud83d", "\x00", ""])
def test_a_table_is_written_once_for_each_content(name: str) -> None:
    """Names in the broker's JSON may be escapes that no UTF-8 spells."""
    tables: dict[str, Any] = {"offsets": {name: 1}}
    store = MemoryStore()
    archive = BrokerStateArchive(store, lambda: tables)
    assert archive.refresh(1, 1)
    (key,) = archive.pending().values()
    assert decode_state(store.get(key), "offsets", source=key) == {name: 1}
    archive.committed(archive.pending())
    assert not archive.refresh(1, 2)
    tables["offsets"] = {name: 2}
    assert archive.refresh(1, 3)
    assert len(list(store.list("state/"))) == 2


def test_a_table_of_another_name_is_refused() -> None:
    store = MemoryStore()
    archive = BrokerStateArchive(store, lambda: {"offsets": {}})
    archive.refresh(1, 1)
    (key,) = archive.pending().values()
    with pytest.raises(CorruptionError, match="holds the broker's table offsets instead of topics"):
        decode_state(store.get(key), "topics", source=key)

"""How tests are shared out between worker processes: file by file, the longest first.

What a file sets up for all its tests (archives, brokers, consumers in a JVM) is set up once, not once a worker; folders
whose files share something costlier (a Spark session, the archives of all stores) stay together as well. The longest
go first, so that at the end no worker is left alone with one of them.

Owns the order. Applies with ``--dist loadfile``; without workers tests run in the order in which they are found.
"""

from collections.abc import Iterable

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/spark/", "tests/fetcher/queries/")
"""Folders that are given out whole."""

LONGEST = (
    "tests/spark/",
    "tests/integration/test_slave.py",
    "tests/integration/test_mount.py",
    "tests/integration/test_proxy_timers.py",
    "tests/integration/test_restore.py",
    "tests/integration/test_proxy_clients.py",
    "tests/integration/test_serving.py",
    "tests/integration/test_access.py",
    "tests/integration/test_proxy.py",
    "tests/integration/test_restore_drill.py",
    "tests/integration/test_republish.py",
    "tests/integration/test_live_broker.py",
    "tests/integration/test_field_faults.py",
    "tests/integration/test_consumequeue_brokers.py",
    "tests/process/test_s3_commands.py",
    "tests/object_store/test_contract.py",
    "tests/object_store/test_s3_failures.py",
    "tests/process/test_admin.py",
    "tests/process/test_bad_input.py",
    "tests/fetcher/queries/",
    "tests/uploader/test_index_builder.py",
    "tests/world/test_world.py",
    "tests/maintenance/test_compaction_ranges.py",
    "tests/process/test_consumequeue.py",
    "tests/server/proxy/test_pull.py",
    "tests/process/test_compaction_task.py",
    "tests/maintenance/test_key_compaction.py",
    "tests/server/slave/test_service.py",
    "tests/fetcher/test_read_router.py",
    "tests/maintenance/test_key_compaction.py",
    "tests/bad_input/test_damaged_logs.py",
    "tests/bad_input/test_bombs.py",
    "tests/end_to_end/test_read_truth.py",
    "tests/maintenance/test_compaction_round.py",
    "tests/object_store/test_s3_scripted.py",
    "tests/faults/test_crash_anywhere.py",
    "tests/process/test_commands.py",
    "tests/uploader/test_bound_source.py",
    "tests/fetcher/test_archive.py",
    "tests/process/test_reading_commands.py",
    "tests/test_tidy.py",
    "tests/test_language.py",
    "tests/uploader/test_follow_loop.py",
    "tests/faults/test_kill_nine.py",
)
"""Files and folders that take longest, the longest first; what is missing here goes behind them, as it is found.
Behind the first are some that run no kernels: in a fresh clone it compiles them for all."""


def unit_of(node_id: str) -> str:
    """What a test is given out with: its folder or its file."""
    file = node_id.split("::", 1)[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The order in which units are given out; inside a unit nothing changes."""
    rank = {unit: at for at, unit in enumerate(LONGEST)}
    return sorted(items, key=lambda item: rank.get(unit_of(item.nodeid), len(rank)))


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
    """Gives out units in the order of the collection, which ``longest_first`` made."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # else units with most tests go first, whatever they take

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

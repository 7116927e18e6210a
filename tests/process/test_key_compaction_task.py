"""Key compaction inside `tiered run`: a child writes the outputs; status, metrics and report say what was done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rocketmq_tiered.maintenance.throttle import Load
from rocketmq_tiered.process.archive_tasks import ArchiveTasks
from rocketmq_tiered.process.compaction_process import ChildStore, writing_in_child
from rocketmq_tiered.process.metrics import StatusCollector
from rocketmq_tiered.process.report import StatusReport, decode_report
from tests.maintenance.keyed_scene import KEYED, Table
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.request_metrics import StoreMetrics
from tiered.object_store.store_options import StoreOptions
from tiered.settings.rule_entries import RuleEntry


def test_a_pass_compacts_what_is_new(tmp_path: Path) -> None:
    store = PrefixedStore(FileStore(tmp_path / "archive"), "cluster/broker/")
    table = Table(tmp_path / "unused", store=store)
    table.write(40)
    settings = replace(
        table.settings,
        topics=replace(table.settings.topics, rules=(RuleEntry(KEYED.topic, key_compaction="on"),)),
    )
    tasks = ArchiveTasks(store, table.owner.writer, settings, Load)
    place = ChildStore(store.url, StoreOptions(), settings.compaction, "INFO")
    metrics = StoreMetrics()
    tasks.add_key_compaction(store, tmp_path / "spool", lambda share: writing_in_child(place, share, metrics))
    assert tasks._keys is not None
    loop = tasks._keys
    (tmp_path / "spool").mkdir(exist_ok=True)
    loop.make_pass()
    assert not any((tmp_path / "spool").iterdir())
    status = tasks.key_compaction
    assert status is not None and status.last_ms is not None and not status.problem
    assert status.rounds == 1 and 0 < status.kept_messages < status.read_messages
    found = table.check()
    loop.make_pass()
    again = tasks.key_compaction
    assert again is not None and (again.rounds, again.read_messages) == (1, status.read_messages), (
        "nothing is new"
    )
    assert table.check() == found

    report = StatusReport(cluster="c", key_compaction=status)
    assert decode_report(report.to_json() | {"later": 1}) == report
    assert f"{status.kept_messages:,} of {status.read_messages:,} messages (" in status.text
    values = {
        sample.name.removeprefix("rocketmq_tiered_store_"): sample.value
        for family in StatusCollector(lambda: report).collect()
        for sample in family.samples
    }
    assert values["key_compaction_kept_messages_total"] == status.kept_messages

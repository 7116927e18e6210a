"""A scrub of an archive, with a clock that a test moves."""

from rocketmq_tiered.maintenance.scrub import ScrubTask
from tiered.archive.task import run_pass
from tiered.archive.verify_progress import VerifyProgress
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.clock import Clock
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import ScrubSettings

DAY_MS = 86_400_000


class Scrubbed:
    """A scrub of ``store`` with a clock."""

    def __init__(self, store: ObjectStore, log: CommitLog | None = None) -> None:
        self.store, self.now_ms = store, 1_700_000_000_000
        self.saved = VerifyProgress(
            store.url, clock=Clock(wall_ms=lambda: self.now_ms), age_ms_max=60 * DAY_MS
        )
        commits = MaintenanceCommit.opened(store, load(store), "test", Clock(wall_ms=lambda: self.now_ms))
        self.task = ScrubTask(commits, ScrubSettings(), self.saved, log, Clock(wall_ms=lambda: self.now_ms))

    def run(self) -> None:
        """A pass, as the loop makes it."""
        assert run_pass(self.task, lambda: load(self.store))

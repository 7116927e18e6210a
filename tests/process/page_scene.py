"""Pages over a real archive in a directory, without a process: answered as the admin server's threads do."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from email.message import Message as Headers
from pathlib import Path

from rocketmq_tiered.page.archive_view import ArchiveView
from rocketmq_tiered.page.page_requests import AdminPages, Process
from rocketmq_tiered.page.settings_table import CurrentSettings
from rocketmq_tiered.process.admin import PageAnswer
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from rocketmq_tiered.server.proxy.relay_status import RelayStatus
from tests.end_to_end.offloading import BROKER, CLUSTER
from tests.process.status_report import REPORT
from tiered.settings.load import LoadedSettings
from tiered.settings.sections import AdminSettings, ArchiveSettings, Settings


@dataclass
class PageScene:
    """``url``: of the archive. Closed with ``close``."""

    url: str
    admin: AdminSettings = field(default_factory=AdminSettings)
    report: StatusReport | None = REPORT
    served: ArchiveStatus | None = None
    relays: Sequence[RelayStatus] = ()
    has_accounts: bool = False
    why: str = "the uploader is running"
    is_ready: bool = True

    def __post_init__(self) -> None:
        settings = replace(Settings(), archive=ArchiveSettings(url=self.url), admin=self.admin)
        self.settings = CurrentSettings(
            LoadedSettings(settings, {"archive.url": "ARCHIVE_URL"}),
            lambda: LoadedSettings(settings, {"archive.url": "tiered.toml"}),
        )
        state = "" if self.report is None else f"{self.report.state}: "
        process = Process(
            "tiered run",
            f"{CLUSTER}/{BROKER} in {self.url}",
            lambda: (True, "alive"),
            lambda: (self.is_ready, f"{state}{self.why}"),
            report=lambda: self.report,
            relays=lambda: self.relays,
            served=lambda: self.served,
            serving=lambda: None,
            shows_clients=bool(self.relays) or self.served is not None,
            has_accounts=lambda: self.has_accounts,
        )
        self.view = ArchiveView(lambda: self.settings.settings, (CLUSTER, BROKER), lambda: None)
        self.pages = AdminPages(process, self.settings, self.view)

    def answer(self, target: str, **headers: str) -> PageAnswer | None:
        """The response; header names have _ for -."""
        given = Headers()
        for name, value in headers.items():
            given[name.replace("_", "-")] = value
        return self.pages.answer(target, given, "192.0.2.7")

    def html(self, target: str, code: int = 200) -> str:
        """A page that is answered with ``code``."""
        answer = self.answer(target)
        assert answer is not None and answer.code == code, answer
        return answer.body.decode()

    def close(self) -> None:
        """Release the archive."""
        self.pages.close()


def token_file(directory: Path, text: str) -> AdminSettings:
    """Settings with a file of this content."""
    path = directory / "token"
    path.write_text(text)
    return AdminSettings(token_file=str(path))


class Alive:
    """An AdminSource without content."""

    def health(self) -> tuple[bool, str]:
        return True, "alive"

    readiness = health

    def status_json(self) -> bytes:
        return b"{}"

    metrics = status_json

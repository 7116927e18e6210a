"""What `make servers` fetches has a fixed version, and is checked after it arrived."""

import re
from pathlib import Path

import pytest

from tests.servers import install, rocketmq
from tests.servers.install import COMPOSE, LOCALSTACK_LOCK, MC, MINIO, PROMTOOL, GoTool, NotInstallableError

HERE = Path(__file__).parent


@pytest.mark.parametrize("tool", [MINIO, MC, COMPOSE, PROMTOOL], ids=lambda tool: tool.package)
def test_go_programs_are_pinned(tool: GoTool) -> None:
    assert re.fullmatch(r"v\d+\.\d+\.\d+(-\d{14}-[0-9a-f]{12})?", tool.version)
    assert re.fullmatch(r"[0-9a-f]{64}", tool.modules_sha256)


def test_nothing_is_fetched_by_a_moving_name() -> None:
    for path in sorted(HERE.glob("*.py")):
        if path != Path(__file__):
            assert not re.search(r"@latest|@master|LATEST|SNAPSHOT", path.read_text("utf-8")), path
    assert re.fullmatch(
        r"org\.apache\.maven\.plugins:maven-dependency-plugin:\d+(\.\d+)+", rocketmq.COPY_PLUGIN
    )


def test_localstack_is_locked_by_hash() -> None:
    text = LOCALSTACK_LOCK.read_text("utf-8")
    entries = re.findall(r"^[\w.\[\]-]+==\S+((?:.|\n(?=\s))*)", text, re.MULTILINE)
    assert len(entries) > 50 and all("--hash=sha256:" in entry for entry in entries)


@pytest.mark.skipif(install.shutil.which("go") is None, reason="go is not on PATH")
def test_a_program_of_other_modules_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_bytes(b"not a Go program")
    with pytest.raises(NotInstallableError, match="not the pinned ones"):
        install._require_modules(MINIO, program)
    assert not program.exists()

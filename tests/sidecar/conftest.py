"""One command line after the other in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.cli import main


@pytest.fixture
def run(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs one command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))

    def execute(*arguments: object) -> tuple[int, str, str]:
        capsysbinary.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        output = capsysbinary.readouterr()
        return code, output.out.decode(), output.err.decode()

    return execute

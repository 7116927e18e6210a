"""share/ is what the parsers generate, and shells and man read it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_tiered.cli import VERBS

SHARE = Path(__file__).parents[2] / "share"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse words its usage by version")
def test_shared_files_are_those_of_the_parsers() -> None:
    command = [sys.executable, "-m", "tests.shared_files", "--check"]
    done = subprocess.run(command, cwd=SHARE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def completed(*words: str) -> set[str]:
    """What bash offers for the last of ``words``."""
    script = (
        f"source {SHARE}/bash-completion/completions/tiered; COMP_WORDS=({' '.join(words)}); "
        f"COMP_CWORD={len(words) - 1}; $(complete -p tiered | grep -oE '_\\w+'); printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_completes_verbs_and_options() -> None:
    assert completed("tiered", '""') >= set(VERBS)


def test_the_page_of_the_command_line_lists_every_verb() -> None:
    page = Path("docs/CLI.md").read_text("utf-8")
    table, sections = page.split("## Conventions")
    assert [verb for verb in VERBS if f"[{verb}](#tiered-{verb}" not in table] == []
    assert [verb for verb in VERBS if f"## tiered {verb}" not in sections] == []
    assert completed("tiered", "ver") == {"verify"}
    assert completed("tiered", "gc", "--app") == {"--apply"}


def test_the_manual_page_is_readable() -> None:
    man = shutil.which("man")
    if man is None:
        pytest.skip("man is not installed")
    done = subprocess.run(
        [man, "--warnings", "-l", str(SHARE / "man" / "man1" / "tiered.1")],
        env={"PATH": "/usr/bin:/bin", "MANPAGER": "cat", "MANWIDTH": "100", "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    assert all(f"tiered {verb}" in done.stdout for verb in VERBS)

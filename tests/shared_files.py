"""Manual page and shell completion of `tiered`, from its parsers: ``python -m tests.shared_files`` writes share/, with
``--check`` it prints the files that differ.

shtab and argparse-manpage generate them. They are development dependencies, so the files are kept and tested.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

import shtab
from build_manpages.manpage import Manpage

from sidecar.cli import EXIT_CODES, VERBS

SHARE = Path(__file__).parent.parent / "share"
DESCRIPTION = (
    "Archive a RocketMQ broker's messages in object storage, read them back, and serve them to clients."
)


def parser() -> argparse.ArgumentParser:
    """All verbs as subcommands of one parser."""
    whole = argparse.ArgumentParser(
        prog="tiered", description=DESCRIPTION, epilog=EXIT_CODES, allow_abbrev=False
    )
    whole.add_argument("--version", action="version", version="tiered", help="print the version")
    verbs = whole.add_subparsers(metavar="VERB", title="verbs")
    for name, (module, text) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        importlib.import_module(module).add_arguments(verb)
        verb.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return whole


def files() -> dict[str, str]:
    """Text by path below share/."""
    os.environ["COLUMNS"] = "100"  # argparse folds usage lines
    whole = parser()
    page = Manpage(whole)
    page.date, page.manual = "", "RocketMQ tiered storage"
    return {
        "man/man1/tiered.1": str(page),
        "bash-completion/completions/tiered": shtab.complete(whole, shell="bash"),
        "zsh/site-functions/_tiered": shtab.complete(whole, shell="zsh"),
    }


def main(arguments: list[str]) -> int:
    """Write the files, or compare them; 1 if some differ."""
    stale = 0
    for name, text in files().items():
        path = SHARE / name
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        elif path.read_text("utf-8") != text:
            stale = 1
            print(f"share/{name} differs: run python -m tests.shared_files")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

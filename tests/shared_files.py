"""Manual page, shell completion and table of options of `tiered`, from its parsers: ``python -m tests.shared_files``
writes share/ and docs/OPTIONS.md, with ``--check`` it prints the files that differ.

shtab and argparse-manpage generate them. They are development dependencies, so the files are kept and tested.
"""

import argparse
import importlib
import os
import sys
from collections import Counter
from pathlib import Path

import shtab
from build_manpages.manpage import Manpage

from rocketmq_tiered.cli import EXIT_CODES, VERBS

ROOT = Path(__file__).parent.parent
COMMON = 8
"""An option with the same meaning in so many verbs is explained once."""
OPTIONS_HEAD = """# Options of the command line

Generated from the program: `make settings-doc`. [CLI.md](CLI.md) says what each command does.
"""
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


def verb_parsers() -> dict[str, set[str]]:
    """The flags of each verb."""
    (verbs,) = (one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    return {
        name: {flag for action in verb._actions for flag in action.option_strings}
        for name, verb in verbs.choices.items()
    }


def files() -> dict[str, str]:
    """Text by path."""
    os.environ["COLUMNS"] = "100"  # argparse folds usage lines
    whole = parser()
    page = Manpage(whole)
    page.date, page.manual = "", "RocketMQ tiered storage"
    return {
        "share/man/man1/tiered.1": str(page),
        "share/bash-completion/completions/tiered": shtab.complete(whole, shell="bash"),
        "share/zsh/site-functions/_tiered": shtab.complete(whole, shell="zsh"),
        "docs/OPTIONS.md": options_page(whole),
    }


def options_page(whole: argparse.ArgumentParser) -> str:
    """In Markdown."""
    (verbs,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    rows = {name: _rows(verb) for name, verb in verbs.choices.items()}
    counts = Counter(row for found in rows.values() for row in found)
    common = [row for row, count in counts.items() if count >= COMMON]
    parts = [OPTIONS_HEAD, "## Options of most verbs\n", _table(common)]
    for name, found in rows.items():
        own = [row for row in found if row not in common]
        parts += [f"## tiered {name}\n", f"{VERBS[name][1][0].upper()}{VERBS[name][1][1:]}.\n"]
        parts += [_table(own)] if own else []
        shared = ", ".join(row[0].split()[0] + "`" * (" " in row[0]) for row in found if row in common)
        parts.append(f"Also {shared}.\n")
    return "\n".join(parts)


def _rows(verb: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Each argument as written, and its meaning."""
    formatter, found = verb._get_formatter(), []
    for action in verb._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = formatter._format_args(action, action.dest.upper())
        names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
        meaning = formatter._expand_help(action) if action.help else ""
        found.append((", ".join(f"`{name}`" for name in names), meaning.replace("|", "\\|")))
    return found


def _table(rows: list[tuple[str, str]]) -> str:
    lines = ["| option | meaning |", "|---|---|", *(f"| {name} | {meaning} |" for name, meaning in rows)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the files, or compare them; 1 if some differ."""
    stale = 0
    for name, text in files().items():
        path = ROOT / name
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        elif path.read_text("utf-8") != text:
            stale = 1
            print(f"{name} differs: run python -m tests.shared_files")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

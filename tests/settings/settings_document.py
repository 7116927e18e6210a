"""Generates docs/SETTINGS.md (`make settings-doc`). A test compares the two."""

import sys
from typing import Any

from tiered.settings.declaration import SettingField, declared
from tiered.settings.rule_entries import RuleEntry
from tiered.settings.sections import SECTIONS, UNSUPPORTED
from tiered.settings.values import limits

_PREAMBLE = """# Settings

<!-- Generated from tiered/settings/sections.py by `python -m tests.settings.settings_document`. Do not edit. -->

Settings come from one TOML file (`--config` or `TIERED_CONFIG`), the environment, and flags; later sources override
earlier ones. `offload.batch_bytes` is `batch_bytes` under `[offload]` in the file, `TIERED_OFFLOAD__BATCH_BYTES` in the
environment, and `--set offload.batch_bytes=64MiB` on the command line. Unknown settings, invalid values and settings
that are not supported yet are errors that name the key and the fix (exit code 2).

Sizes are bytes or text such as `"32MiB"`; times are milliseconds or text such as `"5s"`, at most a hundred years. Lists
are TOML lists or comma-separated text. `tiered config check` prints the effective settings and their sources.

Settings marked ↻ require a restart; SIGHUP applies all others after the running uploads are finished."""

_TYPE_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "text",
    tuple[str, ...]: "list",
    tuple[RuleEntry, ...]: "tables",
}


def settings_document() -> str:
    """The document as Markdown."""
    parts = [_PREAMBLE]
    for section, component in SECTIONS.items():
        parts.append(f"\n## [{section}]\n\n{(component.__doc__ or '').strip()}\n")
        parts.append("| key | type | default | meaning | limits |\n|---|---|---|---|---|")
        parts.extend(_row(item) for item in declared(section, component))
    parts.append("\n## Not supported yet\n\nThese settings are refused:\n")
    parts.extend(f"- `{key}`: {truth}." for key, truth in UNSUPPORTED.items())
    return "\n".join(parts) + "\n"


def _row(item: SettingField) -> str:
    mark = " ↻" if item.rule.restart else ""
    allowed = ", ".join(f"`{choice}`" for choice in item.rule.choices) or limits(item).removeprefix(
        "a value "
    )
    cells = (f"`{item.name}`{mark}", _TYPE_NAMES[item.type], _default(item), item.rule.meaning, allowed)
    return "| " + " | ".join(cells) + " |"


def _default(item: SettingField) -> str:
    value = item.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{part}"' for part in value) + "]`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, int) and item.name.endswith("_bytes"):
        for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
            if value and value % size == 0:
                return f"`{value}` ({value // size} {unit})"
    return f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(settings_document())

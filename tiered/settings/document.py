"""docs/SETTINGS.md, written from the declarations so that it cannot go stale (a test compares).

Run ``python -m tiered.settings.document > docs/SETTINGS.md`` after changing a setting.
"""

from __future__ import annotations

import sys
from typing import Any

from tiered.settings.declaration import SettingField, declared
from tiered.settings.sections import NOT_IN_FORCE, SECTIONS
from tiered.settings.values import limits

_PREAMBLE = """# Settings

<!-- Generated from tiered/settings/sections.py by `python -m tiered.settings.document`. Do not edit. -->

One TOML file (`--config`, or `TIERED_CONFIG`), then the environment, then flags; the later wins.
`offload.batch_bytes` is `batch_bytes` under `[offload]` in the file, `TIERED_OFFLOAD__BATCH_BYTES` in the
environment, and `--set offload.batch_bytes=64MiB` on the command line. A setting nobody knows, an impossible
value and a setting that is not in force yet are errors that name the key and the fix (exit code 2).

Sizes are bytes and may be written `"32MiB"`; times are milliseconds, a hundred years at most, and may be written
`"5s"`. Lists are TOML lists, or texts separated by commas. `tiered config check` prints what is in force and where
it came from.

Settings marked ↻ need a restart; SIGHUP applies all others (a running upload is drained first)."""

_TYPE_NAMES: dict[Any, str] = {
    int: "integer", float: "number", bool: "boolean", str: "text", tuple[str, ...]: "list",
}  # fmt: skip


def settings_document() -> str:
    """The whole document."""
    parts = [_PREAMBLE]
    for section, component in SECTIONS.items():
        parts.append(f"\n## [{section}]\n\n{(component.__doc__ or '').strip()}\n")
        parts.append("| key | type | default | meaning | limits |\n|---|---|---|---|---|")
        parts.extend(_row(item) for item in declared(section, component))
    parts.append("\n## Not in force yet\n\nRefused by name, never ignored:\n")
    parts.extend(f"- `{key}`: {truth}." for key, truth in NOT_IN_FORCE.items())
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

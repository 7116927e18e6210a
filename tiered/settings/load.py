"""Loads settings from defaults, one TOML file, the environment and flags; later sources override earlier ones."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tiered.errors import AccessDeniedError, NotFoundError, UnavailableError, UsageError
from tiered.model.address import host_and_port
from tiered.settings.declaration import SettingField, declared
from tiered.settings.quantities import BadValueError
from tiered.settings.sections import SECTIONS, UNSUPPORTED, Settings
from tiered.settings.values import parse_value

ENVIRONMENT_PREFIX = "TIERED_"
CONFIG_VARIABLE = "TIERED_CONFIG"

FIELDS: dict[str, SettingField] = {
    item.key: item for section, component in SECTIONS.items() for item in declared(section, component)
}

_MISSPELT = {
    ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): ENVIRONMENT_PREFIX + key.replace(".", "__").upper()
    for key in FIELDS
}
"""Variables with one underscore where two are needed -> the right name."""
_INJECTED = ("tcp://", "udp://", "sctp://")
"""Values that Kubernetes injects, such as TIERED_ADMIN_PORT for a service named tiered-admin."""


_ADDRESS = "write host:port, such as 127.0.0.1:10911"


def contradictions(settings: Settings) -> list[tuple[str, str]]:
    """What is wrong with values that are each within their limits, but do not fit together or have a wrong form: (key,
    what is wrong) pairs, none if all fit."""
    offload = settings.offload
    found: list[tuple[str, str]] = []
    if offload.memory_budget_bytes < 3 * offload.batch_bytes:
        found.append(
            (
                "offload.memory_budget_bytes",
                f"must be at least 3 × offload.batch_bytes = {3 * offload.batch_bytes}: while one batch is read, "
                "another is encoded and a third one uploaded",
            )
        )
    found += [(key, _ADDRESS) for key, text in _addresses(settings) if host_and_port(text) is None]
    for section in (
        settings.serve,
        settings.broker,
        settings.read,
        settings.retention,
        settings.slave,
        settings.object_store,
    ):
        found += section.complaints()
    return found


def _addresses(settings: Settings) -> list[tuple[str, str]]:
    """The addresses that must have the form host:port, as (key of the setting, address); empty ones are skipped where
    the setting may be empty."""
    broker, serve, slave = settings.broker, settings.serve, settings.slave
    optional = [
        ("broker.address", broker.address),
        *(("broker.name_servers", text) for text in broker.name_servers),
        ("serve.advertise", serve.advertise),
        ("slave.advertise", slave.advertise),
    ]
    return [
        ("serve.bind", serve.bind),
        ("slave.bind", slave.bind),
        *((key, text) for key, text in optional if text),
    ]


@dataclass(frozen=True)
class LoadedSettings:
    """Settings and the source of each value that is not a default."""

    settings: Settings
    origins: Mapping[str, str]


def load_settings(
    config_path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> LoadedSettings:
    """The settings from the file at ``config_path`` (or at TIERED_CONFIG of ``environment``), overridden by variables
    of ``environment``, overridden by ``flags``; defaults for the rest.

    ``flags`` maps a key to (flag as written, value). Raises UsageError naming key, origin and fix; NotFoundError or
    AccessDeniedError for the file.
    """
    environment = environment or {}
    config_path = config_path or environment.get(CONFIG_VARIABLE) or None
    written: dict[str, tuple[str, Any]] = {}  # (where it was written, value) by key; later sources override
    if config_path is not None:
        written.update(_from_file(Path(config_path)))
    written.update(_from_environment(environment))
    written.update(flags or {})
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, (origin, value) in written.items():
        declared_field = _known(key, origin)
        try:
            values[declared_field.section][declared_field.name] = parse_value(declared_field, value)
        except BadValueError as error:
            raise UsageError(f"{key} = {_shown(value)} ({origin}) is invalid", hint=str(error)) from None
    settings = replace(Settings(), **{name: SECTIONS[name](**chosen) for name, chosen in values.items()})
    for key, complaint in contradictions(settings):
        origin = written[key][0] if key in written else "default"
        raise UsageError(f"{key} = {_shown(value_of(settings, key))} ({origin}) is invalid", hint=complaint)
    return LoadedSettings(settings, {key: origin for key, (origin, _) in written.items()})


def value_of(settings: Settings, key: str) -> Any:
    """The value of the setting ``section.name``."""
    section, name = key.split(".", 1)
    return getattr(getattr(settings, section), name)


def changed_keys(before: Settings, after: Settings) -> list[str]:
    """Keys whose values differ, in declaration order."""
    return [key for key in FIELDS if value_of(before, key) != value_of(after, key)]


def flag_assignments(assignments: list[str]) -> dict[str, tuple[str, Any]]:
    """The ``flags`` argument of load_settings for texts such as ``section.name=value``, each given as ``--set``. Raises
    UsageError for one without a value."""
    flags: dict[str, tuple[str, Any]] = {}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--set {text} has no value", hint="write --set section.name=value")
        flags[key.strip()] = (f"--set {key.strip()}", value.strip())
    return flags


def _from_file(path: Path) -> dict[str, tuple[str, Any]]:
    """The values that the TOML file at ``path`` has, as (path, value) by ``section.name``. Values, and names in known
    sections, are not checked here. Raises a TieredError if the file cannot be read, is no TOML, or has an unknown
    section."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        raise NotFoundError(
            f"configuration file {path} does not exist", hint="correct --config or TIERED_CONFIG"
        ) from None
    except (PermissionError, IsADirectoryError) as error:
        raise AccessDeniedError(
            f"cannot read {path}: {error.strerror}", hint="correct --config or TIERED_CONFIG"
        ) from None
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}", hint="try again") from None
    except (ValueError, RecursionError) as error:  # TOML syntax, encoding, or excessive nesting
        raise UsageError(f"{path} is not valid TOML: {error}", hint="correct that line") from None
    found: dict[str, tuple[str, Any]] = {}
    for section, content in document.items():
        if not isinstance(content, dict):
            raise UsageError(f"{section} in {path} stands outside of any section", hint=_suggestion(section))
        if section not in SECTIONS:
            _known(f"{section}.{next(iter(content), '')}".rstrip("."), str(path))
        for name, value in content.items():
            found[f"{section}.{name}"] = (str(path), value)
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """The values that variables ``TIERED_SECTION__NAME`` of ``environment`` set, as (variable, text) by
    ``section.name``. Raises UsageError for a variable that names a setting but lacks one of the two underscores."""
    found: dict[str, tuple[str, Any]] = {}
    for variable, value in environment.items():
        # Settings have a double underscore: orchestrators inject variables such as TIERED_PORT.
        if variable.startswith(ENVIRONMENT_PREFIX) and "__" in variable:
            key = variable[len(ENVIRONMENT_PREFIX) :].lower().replace("__", ".", 1)
            found[key] = (variable, value)
        elif variable in _MISSPELT and not value.startswith(_INJECTED):
            raise UsageError(
                f"the environment variable {variable} names no setting",
                hint=f"did you mean {_MISSPELT[variable]}? Section and key are separated by two underscores",
            )
    return found


def _known(key: str, origin: str) -> SettingField:
    """The declaration of the setting ``key``. Raises UsageError if there is none; ``origin``: where the key was
    written."""
    if key in FIELDS:
        return FIELDS[key]
    for reserved, reason in UNSUPPORTED.items():
        if key == reserved or key.startswith((f"{reserved}.", f"{reserved}_")):
            raise UsageError(f"{key} ({origin}) is not supported: {reason}", hint="remove it")
    raise UsageError(f"{key} ({origin}) is not a setting", hint=_suggestion(key))


def _shown(value: Any) -> str:
    return value or "(empty)" if isinstance(value, str) else json.dumps(value, default=str)


def _suggestion(key: str) -> str:
    """The hint for an unknown setting ``key``: a setting of the same name in another section, else one with a similar
    name, else the names in its section, else the sections."""
    section, _, name = key.partition(".")
    same_name = [known for known, item in FIELDS.items() if item.name == (name or section)]
    close = same_name or difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    if section in SECTIONS:
        return (
            f"[{section}] has {', '.join(item.name for item in FIELDS.values() if item.section == section)}"
        )
    return f"the sections are {', '.join(item.name for item in fields(Settings))}"

"""The rules of an archive as its owner has them in force: rules of topics, retention, and grace periods.

The owner commits them as a document. Every command on the archive uses them instead of its own settings, and refuses if
these were set to something else. Pure.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from tiered.errors import CorruptionError, UsageError
from tiered.settings.load import FIELDS, LoadedSettings, load_settings, value_of
from tiered.settings.quantities import BadValueError
from tiered.settings.sections import GcSettings, RetentionSettings, Settings
from tiered.settings.values import parse_value

RULES: Final = "rules"
"""The archive-wide setting that holds the document."""
RETENTION_KEYS: Final = (
    "topics.rules",
    *(f"retention.{item.name}" for item in fields(RetentionSettings)),
    *(f"key_compaction.{name}" for name in ("from_broker", "keyless")),
)
"""What decides which messages expire: a command that sets one of them otherwise refuses."""
GRACE_KEYS: Final = ("gc.grace_ms", "gc.diverged_grace_ms")
"""Defaults of commands; a flag or a file may override them."""


def rules_document(settings: Settings) -> dict[str, Any]:
    """The rules of ``settings`` as JSON: setting -> value."""
    return {key: _plain(value_of(settings, key)) for key in (*RETENTION_KEYS, *GRACE_KEYS)}


def with_rules_in_force(
    loaded: LoadedSettings, archive_settings: Mapping[str, Any], rules_path: str | None = None
) -> Settings:
    """The settings of a command on an archive, with the rules that the archive's owner, `tiered run`, has committed;
    ``archive_settings`` has them, if any.

    ``rules_path``: a settings file whose rules count instead. Raises UsageError if the command's own settings set a
    rule that differs from the committed one, and CorruptionError for committed rules that do not parse.
    """
    if rules_path is not None:
        chosen = load_settings(rules_path).settings
        return replace(
            loaded.settings,
            retention=chosen.retention,
            topics=replace(loaded.settings.topics, rules=chosen.topics.rules),
        )
    differing = differences(loaded, archive_settings)
    if differing:
        raise UsageError(
            "; ".join(differing),
            hint="commands use the rules that tiered run has committed to the archive: remove the setting here, change "
            "it for tiered run, or give --rules FILE to this command to use other rules",
        )
    set_here = {key for key in GRACE_KEYS if key in loaded.origins}
    in_force = _in_force(archive_settings).items()
    return _applied(loaded.settings, {key: value for key, value in in_force if key not in set_here})


def topic_rules_in_force(settings: Settings, archive_settings: Mapping[str, Any]) -> Settings:
    """``settings`` with the rules of topics that the archive's owner has committed, if any. Raises CorruptionError."""
    entries = _in_force(archive_settings).get("topics.rules", settings.topics.rules)
    return replace(settings, topics=replace(settings.topics, rules=entries))


def grace_in_force(loaded: LoadedSettings, archive_settings: Mapping[str, Any]) -> GcSettings:
    """The section [gc] of a command's settings, with the grace periods that the archive's owner has committed where the
    command's own settings set none."""
    own = {
        key.removeprefix("gc."): value
        for key, value in _in_force(archive_settings).items()
        if key in GRACE_KEYS and key not in loaded.origins
    }
    return replace(loaded.settings.gc, **own)


def differences(loaded: LoadedSettings, archive_settings: Mapping[str, Any]) -> list[str]:
    """A text for each rule that the command's own settings set to another value than the archive's owner has
    committed."""
    in_force = _in_force(archive_settings)
    return [
        _difference(key, loaded, in_force[key])
        for key in RETENTION_KEYS
        if key in loaded.origins and key in in_force and value_of(loaded.settings, key) != in_force[key]
    ]


def _difference(key: str, loaded: LoadedSettings, in_force: Any) -> str:
    here = _shown(value_of(loaded.settings, key))
    return f"{key} is {here} ({loaded.origins[key]}), and {_shown(in_force)} in the archive"


def _shown(value: Any) -> str:
    plain = _plain(value)
    if not isinstance(plain, list):
        return str(plain)
    rules = [" ".join(f"{name}={item}" for name, item in entry.items()) for entry in plain]
    return f"[{'; '.join(rules)}]"


def _plain(value: Any) -> Any:
    return [entry.to_json() for entry in value] if isinstance(value, tuple) else value


def _in_force(archive_settings: Mapping[str, Any]) -> dict[str, Any]:
    """The committed rules in ``archive_settings``, by the setting's key; empty if none were committed. Keys that only
    a later version knows are ignored. Raises CorruptionError if the rules do not parse."""
    document = archive_settings.get(RULES, {})
    if not isinstance(document, Mapping):
        raise CorruptionError("the rules that tiered run has committed to the archive do not parse")
    try:
        return {
            key: parse_value(FIELDS[key], value)
            for key, value in document.items()
            if key in (*RETENTION_KEYS, *GRACE_KEYS)
        }
    except BadValueError as error:
        raise CorruptionError(
            f"the rules that tiered run has committed to the archive do not parse: {error}"
        ) from None


def _applied(settings: Settings, values: Mapping[str, Any]) -> Settings:
    for section in ("topics", "retention", "gc"):
        own = {key.split(".", 1)[1]: value for key, value in values.items() if key.startswith(f"{section}.")}
        settings = replace(settings, **{section: replace(getattr(settings, section), **own)})
    return settings

"""Options of an object store: the settings section, and values that are never settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered.settings.sections import ObjectStoreSettings


@dataclass(frozen=True)
class S3Credentials:
    """Explicit keys, for tests and embedding programs. Otherwise the SDK's credential chain applies."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StoreOptions:
    """``retry_seconds`` bounds reads, lists and deletes; 0 turns retries off."""

    settings: ObjectStoreSettings = field(default_factory=ObjectStoreSettings)
    credentials: S3Credentials | None = field(default=None, repr=False)
    retry_seconds: float = 20.0

"""What a caller may choose about an object store: the settings section plus what must never be a setting.

Owns the values only; open_store.py builds stores from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered.settings.sections import ObjectStoreSettings


@dataclass(frozen=True)
class S3Credentials:
    """Explicit keys, for tests and embedding programs. Without them the SDK's own chain is asked."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StoreOptions:
    """How a store is opened. ``retry_seconds`` bounds reads, lists and deletes; 0 turns retries off."""

    settings: ObjectStoreSettings = field(default_factory=ObjectStoreSettings)
    credentials: S3Credentials | None = field(default=None, repr=False)
    retry_seconds: float = 20.0

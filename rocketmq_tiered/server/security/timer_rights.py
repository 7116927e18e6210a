"""Whether a timer may be handed over: its sender's rights, once more at its time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rocketmq_tiered.server.security.rules import Rules, RulesFile
from tiered.archive.private_key import private_key
from tiered.model.timer import TOPIC
from tiered.model.timer_seal import sender_of
from tiered.object_store.interface import ObjectStore

ANONYMOUS: Final = "anonymous"
"""The account, if the rules have it, of what was sent to the gateway topic itself, or before there were rules."""


def hand_over_refusal(rules: Rules, key: bytes, properties: Mapping[str, str], body: bytes) -> str | None:
    """Why the message of the gateway topic may not be sent to its own topic; None: it may. Pure. ``key``: the
    archive's private key."""
    name, _, host = (sender_of(key, properties, body) or f"{ANONYMOUS}@").rpartition("@")
    return rules.send_refusal(name or ANONYMOUS, properties.get(TOPIC, ""), host)


class SenderRights:
    """Judges by the rules in force in a file, and the archive's key in ``store``. Raises UsageError if the file is
    invalid at the start."""

    def __init__(self, acl_file: Path, store: ObjectStore) -> None:
        self._rules, self._store, self._key = RulesFile(acl_file), store, b""

    def __call__(self, properties: Mapping[str, str], body: bytes) -> str | None:
        """See hand_over_refusal. Raises what the store raises."""
        self._key = self._key or private_key(self._store)
        self._rules.reload(time.monotonic())
        return hand_over_refusal(self._rules.rules, self._key, properties, body)

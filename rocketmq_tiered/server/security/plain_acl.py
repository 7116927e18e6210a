"""ACL 1.0: accounts of ``plain_acl.yml`` with DENY, PUB and SUB on topics and groups. Pure.

Order: globally trusted addresses, known key, the account's trusted addresses, signature, permissions. A resource that
is not named has the account's default, DENY if there is none. Named resources also bind an administrator.
Sources: org.apache.rocketmq.acl.plain.PlainPermissionManager, PlainAccessConfig, Permission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rocketmq_tiered.server.security import addresses
from rocketmq_tiered.server.security.permissions import (
    Action,
    Kind,
    Permission,
    acl_1_permissions,
    record_permissions,
)
from rocketmq_tiered.server.security.rules import Account, Rules, RulesError, pattern_of, text_of
from rocketmq_tiered.server.wire.request import Request
from tiered.formats.record import Record

_ACTIONS = {"PUB": frozenset({Action.PUB}), "SUB": frozenset({Action.SUB}), "DENY": frozenset[Action](),
            "ANY": frozenset({Action.PUB, Action.SUB})}  # fmt: skip

_YES = frozenset({"true", "1", "y", "t"})
"""As fastjson casts to boolean, also from strings."""


@dataclass(frozen=True)
class Grants:
    """The permissions of one account."""

    topic_default: frozenset[Action] = frozenset()
    group_default: frozenset[Action] = frozenset()
    topics: Mapping[str, frozenset[Action]] = field(default_factory=dict)
    groups: Mapping[str, frozenset[Action]] = field(default_factory=dict)

    @property
    def names_resources(self) -> bool:
        """Whether any topic or group is named."""
        return bool(self.topics or self.groups)

    def allow(self, required: Permission) -> bool:
        """Whether any of its actions is granted."""
        if required.kind is Kind.TOPIC:
            granted = self.topics.get(required.name, self.topic_default)
        else:
            granted = self.groups.get(required.name, self.group_default)
        return bool(granted & required.actions)


class PlainAcl(Rules):
    """See Rules."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises RulesError."""
        super().__init__()
        self._trusted = [pattern_of(one) for one in _list(document, "globalWhiteRemoteAddresses")]
        self._grants: dict[str, Grants] = {}
        for entry in _list(document, "accounts"):
            if not isinstance(entry, dict):
                raise RulesError("accounts: an entry is not a mapping")
            account = _account(entry)
            self._add(account, "access key")
            self._grants[account.name] = Grants(
                _actions(entry.get("defaultTopicPerm") or "DENY"), _actions(entry.get("defaultGroupPerm") or "DENY"),
                _named(_list(entry, "topicPerms")), _named(_list(entry, "groupPerms")),
            )  # fmt: skip

    def is_trusted(self, host: str) -> bool:
        return any(addresses.matches(pattern, host) for pattern in self._trusted)

    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        required = acl_1_permissions(request)
        if required is not None:
            return self._missing(account, required)
        return None if account.is_super else f"account {account.name} is not an administrator"

    def record_refusal(self, account: Account, request: Request, record: Record, host: str) -> str | None:
        return self._missing(account, record_permissions(request, record))

    def _missing(self, account: Account, required: list[Permission]) -> str | None:
        grants = self._grants[account.name]
        if account.is_super and not grants.names_resources:
            return None
        for one in required:
            if not grants.allow(one):
                return f"account {account.name} has no permission for {one.kind.value.lower()} {one.name}"
        return None


def _account(entry: Mapping[str, Any]) -> Account:
    name, secret = text_of(entry.get("accessKey")), text_of(entry.get("secretKey"))
    if len(name) <= 6 or len(secret) <= 6:
        raise RulesError("accessKey and secretKey must have more than 6 characters")
    pattern = pattern_of(entry.get("whiteRemoteAddress"))
    is_administrator = text_of(entry.get("admin")).lower() in _YES
    return Account(name, secret, is_super=is_administrator, trusted_from=pattern)


def _actions(value: object) -> frozenset[Action]:
    granted: frozenset[Action] = frozenset()
    for word in text_of(value).split("|"):
        if word.strip() not in _ACTIONS:
            raise RulesError(
                f"permission {word.strip()} is unknown", hint="use DENY, ANY, PUB, SUB or PUB|SUB"
            )
        granted |= _ACTIONS[word.strip()]
    return granted


def _named(entries: list[Any]) -> dict[str, frozenset[Action]]:
    found = {}
    for entry in entries:
        name, _, permission = text_of(entry).partition("=")
        if not name.strip() or not permission:
            raise RulesError("a permission is not NAME=PERMISSION")
        found[name.strip()] = _actions(permission)
    return found


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    found = document.get(name) or []
    if not isinstance(found, list):
        raise RulesError(f"{name} is not a list")
    return found

"""ACL 1.0: accounts of ``plain_acl.yml`` with DENY, PUB and SUB on topics and groups. Pure.

Order: addresses trusted for everybody, known key, addresses trusted for the account, signature, permissions. A resource
that is not named has the account's default, which is DENY where it is not given. An administrator for whom any resource
is named is bound by that like everybody else.
Sources: org.apache.rocketmq.acl.plain.PlainPermissionManager, PlainAccessConfig, Permission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server.security import addresses
from server.security.permissions import (
    ADMIN_CODES,
    SUB,
    Action,
    Kind,
    Permission,
    acl_1_permissions,
    message_permissions,
)
from server.security.rules import Account, RulesError, text_of
from server.wire.request import Request

_ACTIONS = {"PUB": frozenset({Action.PUB}), "SUB": frozenset({Action.SUB}), "DENY": frozenset[Action](),
            "ANY": frozenset({Action.PUB, Action.SUB})}  # fmt: skip

_YES = frozenset({"true", "1", "y", "t"})
"""fastjson's casts: in quotes it is true as well."""


@dataclass(frozen=True)
class Grants:
    """Of one account."""

    topic_default: frozenset[Action] = frozenset()
    group_default: frozenset[Action] = frozenset()
    topics: Mapping[str, frozenset[Action]] = field(default_factory=dict)
    groups: Mapping[str, frozenset[Action]] = field(default_factory=dict)

    @property
    def names_any(self) -> bool:
        """Whether it is said what the account may do to some resource."""
        return bool(self.topics or self.groups)

    def allow(self, need: Permission) -> bool:
        """Whether any of the actions needed is granted."""
        if need.kind is Kind.TOPIC:
            granted = self.topics.get(need.name, self.topic_default)
        else:
            granted = self.groups.get(need.name, self.group_default)
        return bool(granted & need.actions)


class PlainAcl:
    """See Rules."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises RulesError."""
        self._trusted = [_pattern(one) for one in _list(document, "globalWhiteRemoteAddresses")]
        self.accounts: dict[str, Account] = {}
        self._permissions: dict[str, Grants] = {}
        for entry in _list(document, "accounts"):
            if not isinstance(entry, dict):
                raise RulesError("an account is no mapping")
            account = _account(entry)
            if account.name in self.accounts:
                raise RulesError(f"access key {account.name} is there twice")
            self.accounts[account.name] = account
            self._permissions[account.name] = Grants(
                _actions(entry.get("defaultTopicPerm") or "DENY"), _actions(entry.get("defaultGroupPerm") or "DENY"),
                _named(_list(entry, "topicPerms")), _named(_list(entry, "groupPerms")),
            )  # fmt: skip

    def trusts(self, host: str) -> bool:
        """See Rules."""
        return any(addresses.matches(pattern, host) for pattern in self._trusted)

    def forbids(self, account: Account, request: Request, host: str) -> str | None:
        """See Rules."""
        if request.command.code in ADMIN_CODES and not account.is_free:
            return f"{account.name} is no administrator"
        return self._lacking(account, acl_1_permissions(request))

    def forbids_message(self, account: Account, topic: str, host: str) -> str | None:
        """See Rules."""
        return self._lacking(
            account, [Permission(one.kind, one.name, SUB) for one in message_permissions(topic)]
        )

    def _lacking(self, account: Account, needs: list[Permission]) -> str | None:
        permissions = self._permissions[account.name]
        if account.is_free and not permissions.names_any:
            return None
        for need in needs:
            if not permissions.allow(need):
                return f"{account.name} has no permission for {need.kind.value.lower()} {need.name}"
        return None


def _account(entry: Mapping[str, Any]) -> Account:
    name, secret = text_of(entry.get("accessKey")), text_of(entry.get("secretKey"))
    if len(name) <= 6 or len(secret) <= 6:
        raise RulesError("accessKey and secretKey must have more than 6 characters")
    pattern = _pattern(entry.get("whiteRemoteAddress"))
    is_administrator = text_of(entry.get("admin")).lower() in _YES
    return Account(name, secret, is_free=is_administrator, trusted_from=pattern)


def _pattern(value: object) -> str:
    text = text_of(value)
    if text and not addresses.is_valid(text):
        raise RulesError(f"address {text!r} cannot be read")
    return text


def _actions(value: object) -> frozenset[Action]:
    granted: frozenset[Action] = frozenset()
    for word in text_of(value).split("|"):
        if word.strip() not in _ACTIONS:
            raise RulesError(f"permission {word.strip()!r} is unknown", hint="DENY, ANY, PUB, SUB or PUB|SUB")
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
        raise RulesError(f"{name} is no list")
    return found

"""ACL 2.0 of RocketMQ 5.3: users with passwords, and policies per resource. Pure.

    users: [{username, password, userType: Super|Normal, userStatus: enable|disable}]
    acls:  [{subject: "User:name", policies: [{policyType: Custom|Default, entries: [{resource: "Topic:a*",
             actions: [Sub, Get], sourceIps: [10.0.0.0/8], decision: Allow|Deny}]}]}]

as AUTH_LIST_USER and AUTH_LIST_ACL reply. The most specific matching entry decides: a name before a prefix, a longer
prefix before a shorter one, both before ``*``; Deny before Allow. Without a match the request is refused.
Sources: org.apache.rocketmq.auth.authorization.chain.AclAuthorizationHandler, UserInfo, AclInfo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocketmq_tiered.server.security import addresses
from rocketmq_tiered.server.security.permissions import (
    Action,
    Kind,
    Permission,
    permissions_for,
    record_permissions,
)
from rocketmq_tiered.server.security.rules import Account, Rules, RulesError, pattern_of, text_of
from rocketmq_tiered.server.wire.request import Request
from tiered.formats.record import Record

_ACTIONS = {action.value.lower(): frozenset({action}) for action in Action} | {
    "all": frozenset(Action), "any": frozenset(Action),
}  # fmt: skip
_KINDS = {kind.value.lower(): kind for kind in Kind}


@dataclass(frozen=True)
class Entry:
    """``kind`` None: every kind. ``prefix``: the whole name if ``is_literal``."""

    kind: Kind | None
    prefix: str
    is_literal: bool
    actions: frozenset[Action]
    sources: tuple[str, ...]
    allows: bool

    def matches(self, required: Permission, host: str) -> bool:
        """Whether the entry applies: to the resource, the host and any of the actions."""
        if self.kind not in (None, required.kind) or not self.actions & required.actions:
            return False
        name = required.name
        if name != self.prefix if self.is_literal else not name.startswith(self.prefix):
            return False
        return not self.sources or any(addresses.matches(source, host) for source in self.sources)

    @property
    def rank(self) -> tuple[bool, bool, int, bool]:
        """Sort key: the smallest decides."""
        return self.kind is None, not self.is_literal, -len(self.prefix), self.allows


class UserAcl(Rules):
    """See Rules."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises RulesError."""
        super().__init__()
        for entry in _list(document, "users"):
            self._add(_account(entry), "user")
        self._custom: dict[str, list[Entry]] = {}
        self._default: dict[str, list[Entry]] = {}
        for acl in _mappings(document, "acls"):
            name = text_of(acl.get("subject")).removeprefix("User:")
            for policy in _mappings(acl, "policies"):
                is_default = text_of(policy.get("policyType")).lower() == "default"
                target = self._default if is_default else self._custom
                found = [_entry(entry) for entry in _list(policy, "entries")]
                target[name] = sorted(target.get(name, []) + found, key=lambda entry: entry.rank)

    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        if account.is_super:
            return None
        required = permissions_for(request)
        if required is None:
            return f"account {account.name} is no super user, as request code {request.code} requires"
        return self._missing(account, required, host)

    def record_refusal(self, account: Account, request: Request, record: Record, host: str) -> str | None:
        return self._missing(account, record_permissions(request, record), host)

    def _missing(self, account: Account, required: list[Permission], host: str) -> str | None:
        if account.is_super:
            return None
        for one in required:
            if not self._allows(account.name, one, host):
                resource = f"{one.kind.value.lower()} {one.name}"
                return f"account {account.name} has no permission for {resource} from {host}"
        return None

    def _allows(self, name: str, required: Permission, host: str) -> bool:
        for entries in (self._custom, self._default):
            for entry in entries.get(name, ()):
                if entry.matches(required, host):
                    return entry.allows
        return False


def _account(entry: Any) -> Account:
    if not isinstance(entry, dict):
        raise RulesError("users: an entry is not a mapping")
    name, password = text_of(entry.get("username")), text_of(entry.get("password"))
    if not name or not password:
        raise RulesError("users: an entry has no username or no password")
    kind, status = text_of(entry.get("userType")).lower(), text_of(entry.get("userStatus")).lower()
    if kind not in ("", "super", "normal") or status not in ("", "enable", "disable"):
        raise RulesError(f"user {name}: userType must be Super or Normal, userStatus enable or disable")
    return Account(name, password, is_super=kind == "super", is_enabled=status != "disable")


def _entry(entry: Any) -> Entry:
    if not isinstance(entry, dict):
        raise RulesError("policies: an entry is not a mapping")
    resource = text_of(entry.get("resource"))
    kind_name, _, name = resource.partition(":")
    if resource == "*":
        kind, name = None, "*"
    elif kind_name.lower() in _KINDS and name:
        kind = _KINDS[kind_name.lower()]
    else:
        raise RulesError(
            f"resource {resource} does not parse", hint="use Topic:name, Group:prefix*, Cluster:* or *"
        )
    decision = text_of(entry.get("decision")).lower()
    if decision not in ("allow", "deny"):
        raise RulesError(f"resource {resource}: decision must be Allow or Deny")
    sources = tuple(pattern_of(source) for source in _list(entry, "sourceIps"))
    if "" in sources:
        raise RulesError("sourceIps: an address is empty")
    actions = frozenset[Action]().union(*(_action(one) for one in _list(entry, "actions")))
    return Entry(kind, name.removesuffix("*"), not name.endswith("*"), actions, sources, decision == "allow")


def _action(value: object) -> frozenset[Action]:
    found = _ACTIONS.get(text_of(value).lower())
    if found is None:
        raise RulesError(f"action {text_of(value)} is unknown")
    return found


def _mappings(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = _list(document, name)
    if not all(isinstance(one, dict) for one in found):
        raise RulesError(f"{name}: an entry is not a mapping")
    return found


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    found = document.get(name) if isinstance(document, Mapping) else None
    if found is None:
        return []
    if not isinstance(found, list):
        raise RulesError(f"{name} is not a list")
    return found

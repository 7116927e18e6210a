"""ACL 2.0 of RocketMQ 5.3: users with passwords, and policies of what each may do to which resources. Pure.

    users: [{username, password, userType: Super|Normal, userStatus: enable|disable}]
    acls:  [{subject: "User:name", policies: [{policyType: Custom|Default, entries: [{resource: "Topic:a*",
             actions: [Sub, Get], sourceIps: [10.0.0.0/8], decision: Allow|Deny}]}]}]

which is what AUTH_LIST_USER and AUTH_LIST_ACL answer. Of the entries that match, the most specific decides: a name
before a prefix, a longer prefix before a shorter, both before ``*``; Deny before Allow. None: refused.
Sources: org.apache.rocketmq.auth.authorization.chain.AclAuthorizationHandler, UserInfo, AclInfo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.security import addresses
from server.security.permissions import Action, Kind, Permission, message_permissions, permissions_for
from server.security.rules import Account, RulesError, text_of
from server.wire.request import Request

_ACTIONS = {action.value.lower(): frozenset({action}) for action in Action} | {
    "all": frozenset(Action), "any": frozenset(Action),
}  # fmt: skip
_KINDS = {kind.value.lower(): kind for kind in Kind}


@dataclass(frozen=True)
class Entry:
    """``kind`` None: of every kind. ``prefix``: the name, or what names begin with."""

    kind: Kind | None
    prefix: str
    is_literal: bool
    actions: frozenset[Action]
    sources: tuple[str, ...]
    allows: bool

    def matches(self, need: Permission, host: str) -> bool:
        """Whether it says anything about this: about any of the actions that would do."""
        if self.kind not in (None, need.kind) or not self.actions & need.actions:
            return False
        if need.name != self.prefix if self.is_literal else not need.name.startswith(self.prefix):
            return False
        return not self.sources or any(addresses.matches(source, host) for source in self.sources)

    @property
    def rank(self) -> tuple[bool, bool, int, bool]:
        """The smallest decides."""
        return self.kind is None, not self.is_literal, -len(self.prefix), self.allows


class UserAcl:
    """See Rules."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises RulesError."""
        self.accounts: dict[str, Account] = {}
        for entry in _list(document, "users"):
            account = _account(entry)
            if account.name in self.accounts:
                raise RulesError(f"user {account.name} is there twice")
            self.accounts[account.name] = account
        self._custom: dict[str, list[Entry]] = {}
        self._default: dict[str, list[Entry]] = {}
        for acl in _mappings(document, "acls"):
            name = text_of(acl.get("subject")).removeprefix("User:")
            for policy in _mappings(acl, "policies"):
                is_default = text_of(policy.get("policyType")).lower() == "default"
                target = self._default if is_default else self._custom
                found = [_entry(entry) for entry in _list(policy, "entries")]
                target[name] = sorted(target.get(name, []) + found, key=lambda entry: entry.rank)

    def trusts(self, host: str) -> bool:
        """See Rules: nobody is, unsigned."""
        return False

    def forbids(self, account: Account, request: Request, host: str) -> str | None:
        """See Rules."""
        return self._lacking(account, permissions_for(request), host)

    def forbids_message(self, account: Account, topic: str, host: str) -> str | None:
        """See Rules."""
        return self._lacking(account, message_permissions(topic), host)

    def _lacking(self, account: Account, needs: list[Permission], host: str) -> str | None:
        if account.is_free:
            return None
        for need in needs:
            if not self._allows(account.name, need, host):
                return (
                    f"{account.name} has no permission for {need.kind.value.lower()} {need.name} from {host}"
                )
        return None

    def _allows(self, name: str, need: Permission, host: str) -> bool:
        for entries in (self._custom, self._default):
            for entry in entries.get(name, ()):
                if entry.matches(need, host):
                    return entry.allows
        return False


def _account(entry: Any) -> Account:
    if not isinstance(entry, dict):
        raise RulesError("a user is no mapping")
    name, password = text_of(entry.get("username")), text_of(entry.get("password"))
    if not name or not password:
        raise RulesError("a user has no username or no password")
    kind, status = text_of(entry.get("userType")).lower(), text_of(entry.get("userStatus")).lower()
    if kind not in ("", "super", "normal") or status not in ("", "enable", "disable"):
        raise RulesError(f"user {name}: userType is Super or Normal, userStatus enable or disable")
    return Account(name, password, is_free=kind == "super", is_enabled=status != "disable")


def _entry(entry: Any) -> Entry:
    if not isinstance(entry, dict):
        raise RulesError("a policy entry is no mapping")
    resource = text_of(entry.get("resource"))
    kind_name, _, name = resource.partition(":")
    if resource == "*":
        kind, name = None, "*"
    elif kind_name.lower() in _KINDS and name:
        kind = _KINDS[kind_name.lower()]
    else:
        raise RulesError(
            f"resource {resource!r} cannot be read", hint="Topic:name, Group:prefix*, Cluster:* or *"
        )
    decision = text_of(entry.get("decision")).lower()
    if decision not in ("allow", "deny"):
        raise RulesError(f"resource {resource}: decision is Allow or Deny")
    sources = tuple(text_of(source) for source in _list(entry, "sourceIps"))
    for source in sources:
        if not addresses.is_valid(source):
            raise RulesError(f"address {source!r} cannot be read")
    actions = frozenset[Action]().union(*(_action(one) for one in _list(entry, "actions")))
    return Entry(kind, name.removesuffix("*"), not name.endswith("*"), actions, sources, decision == "allow")


def _action(value: object) -> frozenset[Action]:
    found = _ACTIONS.get(text_of(value).lower())
    if found is None:
        raise RulesError(f"action {text_of(value)!r} is unknown")
    return found


def _mappings(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = _list(document, name)
    if not all(isinstance(one, dict) for one in found):
        raise RulesError(f"{name} holds what is no mapping")
    return found


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    found = document.get(name) if isinstance(document, Mapping) else None
    if found is None:
        return []
    if not isinstance(found, list):
        raise RulesError(f"{name} is no list")
    return found

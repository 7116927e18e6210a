"""Accounts and access rules, read from a file, and again when it changes: ACL 1.0, and ACL 2.0 of RocketMQ 5.3. An
invalid new file leaves the old rules in force. Logs and errors never quote the file: it contains secrets.

ACL 1.0 (``plain_acl.yml``): DENY, PUB and SUB on topics and groups. Order: globally trusted addresses, known key, the
account's trusted addresses, signature, permissions. A resource that is not named has the account's default, DENY if
there is none. Named resources also bind an administrator. Sources:
org.apache.rocketmq.acl.plain.PlainPermissionManager, PlainAccessConfig, Permission.

ACL 2.0: users with passwords, and policies per resource,

    users: [{username, password, userType: Super|Normal, userStatus: enable|disable}]
    acls:  [{subject: "User:name", policies: [{policyType: Custom|Default, entries: [{resource: "Topic:a*",
             actions: [Sub, Get], sourceIps: [10.0.0.0/8], decision: Allow|Deny}]}]}]

as AUTH_LIST_USER and AUTH_LIST_ACL reply. The most specific matching entry decides: a name before a prefix, a longer
prefix before a shorter one, both before ``*``; Deny before Allow. Without a match the request is refused. Sources:
org.apache.rocketmq.auth.authorization.chain.AclAuthorizationHandler, UserInfo, AclInfo.
"""

from __future__ import annotations

import difflib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rocketmq_tiered.server.security import addresses
from rocketmq_tiered.server.security.permissions import (
    PUB,
    Action,
    Kind,
    Permission,
    acl_1_permissions,
    permissions_for,
    record_permissions,
    topic_permission,
)
from rocketmq_tiered.server.wire.request import Request
from tiered.errors import UsageError
from tiered.formats.record import Record
from tiered.private_directory import check_trusted_file
from tiered.remoting.command import request_name


class RulesError(UsageError):
    """The file is not valid. Never contains a secret."""


@dataclass(frozen=True)
class Account:
    """``is_super``: an administrator or super user, with all permissions unless rules name some."""

    name: str
    secret: str = field(repr=False)
    is_super: bool = False
    is_enabled: bool = True
    trusted_from: str = ""
    """Address pattern that needs neither signature nor permission."""

    def is_trusted(self, host: str) -> bool:
        """Whether its requests from ``host`` are allowed."""
        return bool(self.trusted_from) and addresses.matches(self.trusted_from, host)


class Rules(ABC):
    """The rules of one file."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        """Accounts by access key or user name."""

    def _add(self, account: Account, title: str) -> None:
        if account.name in self.accounts:
            raise RulesError(f"{title} {account.name} is defined twice")
        self.accounts[account.name] = account

    def is_trusted(self, host: str) -> bool:
        """Whether all requests from ``host`` are allowed."""
        return False

    def explained(self) -> list[tuple[str, str]]:
        """The rules as they are understood: account, what it may or may not, first what decides first."""
        found = []
        for account in self.accounts.values():
            rank = "administrator" if account.is_super else "account" if account.is_enabled else "disabled"
            trusted = [f"trusted from {account.trusted_from}"] if account.trusted_from else []
            found += [(account.name, text) for text in (rank, *trusted, *self._explained(account.name))]
        return found

    @abstractmethod
    def _explained(self, name: str) -> list[str]:
        """The rules of one account, a line each."""

    @abstractmethod
    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        """Why ``account`` may not send ``request``, or None. Raises BadRequestError."""

    def send_refusal(self, name: str, topic: str, host: str) -> str | None:
        """Why the account ``name`` may not send to ``topic`` from ``host``, or None: of messages without a request."""
        account = self.accounts.get(name)
        if self.is_trusted(host) or (account is not None and account.is_trusted(host)):
            return None
        if account is None or not account.is_enabled:
            return f"account {name} {'does not exist' if account is None else 'is disabled'}"
        return self._missing(account, [topic_permission(topic, PUB)], host)

    def record_refusal(self, account: Account, request: Request, record: Record, host: str) -> str | None:
        """Why ``account`` may not send ``request``, which names ``record`` by its physical offset, or None."""
        return self._missing(account, record_permissions(request, record), host)

    @abstractmethod
    def _missing(self, account: Account, required: Sequence[Permission], host: str) -> str | None:
        """The first of ``required`` that ``account`` lacks, as a reason."""


def text_of(value: object) -> str:
    """A YAML scalar as text: keys of digits may be written without quotes."""
    return "" if value is None else str(value).strip()


def _words(actions: Iterable[Action]) -> str:
    return ", ".join(sorted(action.value for action in actions))


def pattern_of(value: object) -> str:
    """An address pattern. Raises RulesError if it does not parse."""
    text = text_of(value)
    if text and not addresses.is_valid(text):
        raise RulesError(f"address {text} does not parse")
    return text


class _Lined(dict[Any, Any]):
    """A mapping of the file. ``line``: where it begins."""

    line = 0


class _Loader(yaml.SafeLoader):
    """Of two equal names YAML takes the last: a rule would have no effect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for name, _ in node.value:
            if name.value in names:
                raise RulesError(f"line {name.start_mark.line + 1}: {name.value} is there twice")
            names.add(name.value)
        found = _Lined(
            {str(name): value for name, value in super().construct_mapping(node, deep=True).items()}
        )
        found.line = node.start_mark.line + 1
        return found


def _construct(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    return loader.construct_mapping(node)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct)


def _mappings(document: Mapping[str, Any], name: str, names: str) -> list[Mapping[str, Any]]:
    """The entries of a list, each with no other than the ``names``."""
    found = _list(document, name)
    if not all(isinstance(one, dict) for one in found):
        raise RulesError(f"{name}: an entry is not a mapping")
    for one in found:
        _require_names(one, names)
    return found


def _require_names(mapping: Mapping[str, Any], names: str) -> None:
    for name in map(str, mapping):
        if name not in names.split():
            near = difflib.get_close_matches(name, names.split(), 1)
            hint = f"write {near[0]}" if near else f"the names here are {', '.join(names.split())}"
            raise RulesError(f"line {getattr(mapping, 'line', 0)}: {name} is unknown", hint=hint)


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    found = document.get(name)
    if found is not None and not isinstance(found, list):
        raise RulesError(f"{name} is not a list")
    return found or []


# -- ACL 1.0 ------------------------------------------------------------------------------------------------------

_WORDS = {
    "PUB": frozenset({Action.PUB}),
    "SUB": frozenset({Action.SUB}),
    "DENY": frozenset[Action](),
    "ANY": frozenset({Action.PUB, Action.SUB}),
}

_ACCOUNT = (
    "accessKey secretKey whiteRemoteAddress admin defaultTopicPerm defaultGroupPerm topicPerms groupPerms"
)
_NAME = re.compile(r"[^\s*=]+")
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
    """The rules of a plain_acl.yml, as brokers of ACL 1.0 read it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises RulesError."""
        super().__init__()
        _require_names(document, "globalWhiteRemoteAddresses accounts dataVersion")
        self._trusted = [pattern_of(one) for one in _list(document, "globalWhiteRemoteAddresses")]
        self._grants: dict[str, Grants] = {}
        for entry in _mappings(document, "accounts", _ACCOUNT):
            account = _plain_account(entry)
            self._add(account, "access key")
            self._grants[account.name] = Grants(
                _granted(entry.get("defaultTopicPerm") or "DENY"),
                _granted(entry.get("defaultGroupPerm") or "DENY"),
                _named(_list(entry, "topicPerms")),
                _named(_list(entry, "groupPerms")),
            )

    def _explained(self, name: str) -> list[str]:
        grants = self._grants[name]
        kinds = ("topic", grants.topics, grants.topic_default), ("group", grants.groups, grants.group_default)
        return [
            f"{kind} {one}: {_words(actions) or 'deny'}"
            for kind, named, default in kinds
            for one, actions in (*named.items(), ("*", default))
        ]

    def is_trusted(self, host: str) -> bool:
        return any(addresses.matches(pattern, host) for pattern in self._trusted)

    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        required = acl_1_permissions(request)
        if required is not None:
            return self._missing(account, required, host)
        return None if account.is_super else f"account {account.name} is not an administrator"

    def _missing(self, account: Account, required: Sequence[Permission], host: str) -> str | None:
        grants = self._grants[account.name]
        if account.is_super and not grants.names_resources:
            return None
        for one in required:
            if not grants.allow(one):
                return f"account {account.name} has no permission for {one.kind.value.lower()} {one.name}"
        return None


def _plain_account(entry: Mapping[str, Any]) -> Account:
    name, secret = text_of(entry.get("accessKey")), text_of(entry.get("secretKey"))
    if len(name) <= 6 or len(secret) <= 6:
        raise RulesError("accessKey and secretKey must have more than 6 characters")
    pattern = pattern_of(entry.get("whiteRemoteAddress"))
    is_administrator = text_of(entry.get("admin")).lower() in _YES
    return Account(name, secret, is_super=is_administrator, trusted_from=pattern)


def _granted(value: object) -> frozenset[Action]:
    granted: frozenset[Action] = frozenset()
    for word in text_of(value).split("|"):
        if word.strip() not in _WORDS:
            raise RulesError(
                f"permission {word.strip()} is unknown", hint="use DENY, ANY, PUB, SUB or PUB|SUB"
            )
        granted |= _WORDS[word.strip()]
    return granted


def _named(entries: list[Any]) -> dict[str, frozenset[Action]]:
    found = {}
    for entry in entries:
        name, _, permission = text_of(entry).partition("=")
        name = name.strip()
        if not _NAME.fullmatch(name) or not permission:
            raise RulesError(
                f"permission {text_of(entry)} is not NAME=PERMISSION",
                hint="for all others use defaultTopicPerm",
            )
        if name in found:
            raise RulesError(f"{name} has two permissions")
        found[name] = _granted(permission)
    return found


# -- ACL 2.0 ------------------------------------------------------------------------------------------------------

_ACTIONS = {action.value.lower(): frozenset({action}) for action in Action} | {
    "all": frozenset(Action),
    "any": frozenset(Action),
}
_ENTRY = "resource actions sourceIps decision"
_KINDS = {kind.value.lower(): kind for kind in Kind}


@dataclass(frozen=True)
class RuleEntry:
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
    def text(self) -> str:
        """For people."""
        kind = "any" if self.kind is None else self.kind.value.lower()
        hosts = f" from {', '.join(self.sources)}" if self.sources else ""
        decision = "allow" if self.allows else "deny"
        return (
            f"{kind} {self.prefix}{'' if self.is_literal else '*'}: {decision} {_words(self.actions)}{hosts}"
        )

    @property
    def rank(self) -> tuple[bool, bool, int, bool]:
        """Sort key: the smallest decides."""
        return self.kind is None, not self.is_literal, -len(self.prefix), self.allows


class UserAcl(Rules):
    """Users and their rules, as brokers 5.x have them."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises RulesError."""
        super().__init__()
        _require_names(document, "users acls")
        for entry in _mappings(document, "users", "username password userType userStatus"):
            self._add(_user(entry), "user")
        self._custom: dict[str, list[RuleEntry]] = {}
        self._default: dict[str, list[RuleEntry]] = {}
        for acl in _mappings(document, "acls", "subject policies"):
            prefix, _, name = text_of(acl.get("subject")).partition(":")
            if prefix != "User" or name not in self.accounts:
                raise RulesError(
                    f"line {getattr(acl, 'line', 0)}: subject {text_of(acl.get('subject'))} is no user of this file",
                    hint="write User:NAME, with a username of users",
                )
            for policy in _mappings(acl, "policies", "policyType entries"):
                kind = text_of(policy.get("policyType")).lower()
                if kind not in ("", "custom", "default"):
                    raise RulesError(f"policyType {kind} is unknown", hint="use Custom or Default")
                target = self._default if kind == "default" else self._custom
                found = [_entry(entry) for entry in _mappings(policy, "entries", _ENTRY)]
                target[name] = sorted(target.get(name, []) + found, key=lambda entry: entry.rank)

    def _explained(self, name: str) -> list[str]:
        return [entry.text for entries in (self._custom, self._default) for entry in entries.get(name, ())]

    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        if account.is_super:
            return None
        required = permissions_for(request)
        if required is None:
            return f"account {account.name} is no super user, as {request_name(request.code)} requires"
        return self._missing(account, required, host)

    def _missing(self, account: Account, required: Sequence[Permission], host: str) -> str | None:
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


def _user(entry: Mapping[str, Any]) -> Account:
    name, password = text_of(entry.get("username")), text_of(entry.get("password"))
    if not name or not password:
        raise RulesError("users: an entry has no username or no password")
    kind, status = text_of(entry.get("userType")).lower(), text_of(entry.get("userStatus")).lower()
    if kind not in ("", "super", "normal") or status not in ("", "enable", "disable"):
        raise RulesError(f"user {name}: userType must be Super or Normal, userStatus enable or disable")
    return Account(name, password, is_super=kind == "super", is_enabled=status != "disable")


def _entry(entry: Mapping[str, Any]) -> RuleEntry:
    resource = text_of(entry.get("resource"))
    kind_name, _, name = resource.partition(":")
    if resource == "*":
        kind, name = None, "*"
    elif kind_name.lower() in _KINDS and (name == "*" or _NAME.fullmatch(name.removesuffix("*"))):
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
    if not actions:
        raise RulesError(f"line {getattr(entry, 'line', 0)}: resource {resource} has no actions")
    return RuleEntry(
        kind, name.removesuffix("*"), not name.endswith("*"), actions, sources, decision == "allow"
    )


def _action(value: object) -> frozenset[Action]:
    found = _ACTIONS.get(text_of(value).lower())
    if found is None:
        raise RulesError(f"action {text_of(value)} is unknown")
    return found


logger = logging.getLogger(__name__)

RELOAD_S = 1.0
FILE_BYTES_MAX = 16 * 1024 * 1024


def read_rules(path: Path) -> Rules:
    """ACL 1.0 if the file has ``accounts``, 5.x users and policies if it has ``users``. Raises UsageError."""
    try:
        check_trusted_file(path, "serve.acl_file")
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise RulesError(f"{path} cannot be read: {error.strerror}", hint="set serve.acl_file") from error
    if len(data) > FILE_BYTES_MAX:
        raise RulesError(f"{path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        document = _Loader(data).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else "?"
        raise RulesError(f"{path} is not YAML: line {line}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RulesError(f"{path} is not YAML") from None
    except RulesError as error:
        raise RulesError(f"{path}: {error.message}", hint=error.hint) from None
    try:
        if isinstance(document, dict) and ("users" in document or "acls" in document):
            return UserAcl(document)
        if isinstance(document, dict) and (
            "accounts" in document or "globalWhiteRemoteAddresses" in document
        ):
            return PlainAcl(document)
    except RulesError as error:
        raise RulesError(f"{path}: {error.message}", hint=error.hint) from None
    raise RulesError(f"{path} has neither accounts (ACL 1.0) nor users (5.x)")


class RulesFile:
    """The rules in force. ``on_reload``: called after each reload with whether it succeeded. Raises UsageError if the
    file is invalid at the start."""

    def __init__(self, path: Path, on_reload: Callable[[bool], None] = lambda _: None) -> None:
        self._path, self._on_reload = path, on_reload
        self._checked_s = 0.0
        self._mark = self._mark_of_file()
        self.rules = read_rules(path)

    def reload(self, now_s: float) -> None:
        """Read the file again if it changed; checks at most every RELOAD_S."""
        if now_s - self._checked_s < RELOAD_S:
            return
        self._checked_s = now_s
        mark = self._mark_of_file()
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self.rules = read_rules(self._path)
        except UsageError as error:
            logger.error("access rules not reloaded, the old ones stay: %s", error)
            self._on_reload(False)
        else:
            logger.info("access rules reloaded", extra={"accounts": len(self.rules.accounts)})
            self._on_reload(True)

    def _mark_of_file(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

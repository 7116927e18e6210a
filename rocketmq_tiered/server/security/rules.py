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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
from tiered.model.queue import DEAD_PREFIX, LMQ_PREFIX, RETRY_PREFIX
from tiered.model.topic_names import invalid_name, shortened
from tiered.private_directory import check_trusted_file
from tiered.reloaded_files import ReloadedFiles
from tiered.remoting.command import request_name

T = TypeVar("T")


class RulesError(UsageError):
    """The file is not valid. Never contains a secret. ``line``: of the file, 0 while it is unknown."""

    line = 0

    def at(self, line: int) -> RulesError:
        """Name ``line`` unless a line further inside is named."""
        self.line = self.line or line
        return self


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
        self._trusted: list[str] = []
        """Addresses from which all requests are allowed."""

    def _add(self, account: Account, title: str) -> None:
        if account.name in self.accounts:
            raise RulesError(f"{title} {account.name} is defined twice", hint="make one entry of both")
        self.accounts[account.name] = account

    def is_trusted(self, host: str) -> bool:
        """Whether all requests from ``host`` are allowed."""
        return any(addresses.matches(pattern, host) for pattern in self._trusted)

    def explained(self) -> list[tuple[str, str]]:
        """Return the rules in words, as pairs of an account and what it is, may or may not do. What decides first comes
        first."""
        explained = [("every client", f"trusted from {pattern}") for pattern in self._trusted if pattern]
        for account in self.accounts.values():
            rank = "administrator" if account.is_super else "account" if account.is_enabled else "disabled"
            trusted = [f"trusted from {account.trusted_from}"] if account.trusted_from else []
            rules = (
                ["*: allow everything"] if self._may_everything(account) else self._explained(account.name)
            )
            explained += [(account.name, text) for text in (rank, *trusted, *rules)]
        return explained

    @abstractmethod
    def _explained(self, name: str) -> list[str]:
        """The rules of one account, a line each."""

    def _may_everything(self, account: Account) -> bool:
        """Whether it needs no rule."""
        return account.is_super

    @abstractmethod
    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        """Why ``account`` may not send ``request``, or None. Raises BadRequestError."""

    def send_refusal(self, name: str, topic: str, host: str) -> str | None:
        """Return why the account ``name`` may not send to ``topic`` from ``host``, None if it may. For timers, whose
        messages are sent long after the requests that set them were judged."""
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
    """A YAML scalar as text: keys of digits may be written without quotes. Raises RulesError for another value."""
    if isinstance(value, dict | list):
        raise RulesError(
            "a list or mapping stands where a single value belongs", hint="write a single value, in quotes"
        )
    return "" if value is None else str(value).strip()


def _words(actions: Iterable[Action]) -> str:
    return ", ".join(sorted(action.value for action in actions))


def pattern_of(value: object) -> str:
    """Return a value of the file that is an address or a pattern of addresses; it may be empty. Raises RulesError if it
    does not parse."""
    text = text_of(value)
    if text and not addresses.is_valid(text):
        raise RulesError(
            f"{text} is neither an IP address nor a pattern of addresses",
            hint="write an address like 10.0.0.1, 10.0.*.*, 10.0.0.1-9 or 10.0.0.0/8",
        )
    return text


def _checked_name(kind: str, name: str) -> str:
    """Return the name of a topic or group (``kind``) that a rule is for. Raises RulesError for a name that none can
    have, as the rule would have no effect."""
    for prefix in (RETRY_PREFIX, DEAD_PREFIX):
        if name.startswith(prefix):
            raise RulesError(
                f"a rule for topic {name} has no effect: access to it follows from that to its group",
                hint=f"write a rule for group {name.removeprefix(prefix)}",
            )
    if (not name.startswith(LMQ_PREFIX) and invalid_name(name) is not None) or name.endswith("%"):
        raise RulesError(
            f"a rule for {kind} {shortened(ascii(name))} has no effect: no {kind} can have this name",
            hint="use one name of letters, digits, %, |, - and _",
        )
    return name


class _Lined(dict[str, Any]):
    """A mapping of the file. ``lines``: of each name."""

    lines: Mapping[str, int]


class _Items(list[Any]):
    """A list of the file. ``lines``: of each item."""

    lines: Sequence[int]


class _Loader(yaml.SafeLoader):
    """Reads YAML and refuses a name that occurs twice: YAML takes the last, so that a rule would have no effect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a YAML mapping as a dict that knows the line of each name, for errors. Raises RulesError for a name
        that is there twice, of which YAML would take the last."""
        lines = dict[str, int]()
        for name, _ in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                raise RulesError(
                    "a list or mapping stands where a name belongs", hint="write NAME: VALUE"
                ).at(line)
            if name.value in lines:
                raise RulesError(
                    f"{name.value} is there twice in one mapping", hint="make one entry of both"
                ).at(line)
            lines[name.value] = line
        mapping = _Lined(
            {str(name): value for name, value in super().construct_mapping(node, deep=True).items()}
        )
        mapping.lines = lines
        return mapping

    def construct_items(self, node: yaml.SequenceNode) -> _Items:
        """A list with the line of each item."""
        found = _Items(self.construct_sequence(node, deep=True))
        found.lines = [item.start_mark.line + 1 for item in node.value]
        return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _Loader.construct_mapping)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SEQUENCE_TAG, _Loader.construct_items)


def _each(mapping: _Lined, name: str, read: Callable[[Any], T], *, is_required: bool = False) -> list[T]:
    """Return what ``read`` makes of each item of the list that ``mapping`` has under ``name``. Raises RulesError, with
    the line of the file, for an item that ``read`` refuses, for a value that is no list, and for a missing required
    list."""
    items = mapping.get(name)
    if not isinstance(items, _Items | None) or (items is None and is_required):
        raise RulesError(
            f"the value of {name} is not a list", hint=f"write {name}: [...], or its items with dashes"
        ).at(mapping.lines.get(name, 0))
    result = list[T]()
    for item, line in () if items is None else zip(items, items.lines, strict=True):
        try:
            result.append(read(item))
        except RulesError as error:
            raise error.at(line) from None
    return result


def _mapping(found: Any, names: str) -> _Lined:
    """Return ``found``, a value of the file, if it is a mapping with no other names than ``names``, which are separated
    by spaces. Raises RulesError otherwise, with the name that may be meant."""
    if not isinstance(found, _Lined):
        raise RulesError(
            "an entry is not a mapping of names to values",
            hint=f"write NAME: VALUE, with the names {', '.join(names.split())}",
        )
    for name in found:
        if name not in names.split():
            near = difflib.get_close_matches(name.strip(), names.split(), 1, 0.5)
            hint = f"write {near[0]}" if near else f"its fields are {', '.join(names.split())}"
            raise RulesError(f"{name} is not a field of this entry", hint=hint).at(found.lines.get(name, 0))
    return found


def _field(mapping: _Lined, name: str, read: Callable[[object], T]) -> T:
    """What ``read`` makes of one value. Raises RulesError with its line."""
    try:
        return read(mapping.get(name))
    except RulesError as error:
        raise error.at(mapping.lines.get(name, 0)) from None


def _text(mapping: _Lined, name: str) -> str:
    return _field(mapping, name, text_of)


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
_IS_TRUE = dict.fromkeys(("true", "1", "y", "t"), True) | dict.fromkeys(
    ("", "false", "0", "n", "f", "null"), False
)
"""Which values fastjson, RocketMQ's library, casts to true and false, also from strings."""


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

    def __init__(self, document: _Lined) -> None:
        """Read the rules of ``document``, the content of a plain_acl.yml. Raises RulesError for any that is not
        valid."""
        super().__init__()
        _mapping(document, "globalWhiteRemoteAddresses accounts dataVersion")
        self._trusted = _each(document, "globalWhiteRemoteAddresses", pattern_of)
        self._grants: dict[str, Grants] = {}
        _each(document, "accounts", self._read_account)

    def _read_account(self, found: Any) -> None:
        """Add the account that ``found``, one entry of ``accounts``, describes, with its permissions. Raises
        RulesError."""
        entry = _mapping(found, _ACCOUNT)
        account = _plain_account(entry)
        self._add(account, "access key")
        self._grants[account.name] = Grants(
            _field(entry, "defaultTopicPerm", _granted),
            _field(entry, "defaultGroupPerm", _granted),
            _named(entry, "topicPerms"),
            _named(entry, "groupPerms"),
        )

    def _may_everything(self, account: Account) -> bool:
        return account.is_super and not self._grants[account.name].names_resources

    def _explained(self, name: str) -> list[str]:
        """Return the permissions of an account as lines for people. What topics and groups without a rule of their own
        get is shown for ``*``."""
        grants = self._grants[name]
        kinds = ("topic", grants.topics, grants.topic_default), ("group", grants.groups, grants.group_default)
        return [
            f"{kind} {resource}: {_words(actions) or 'deny'}"
            for kind, named, default in kinds
            for resource, actions in (*named.items(), ("*", default))
        ]

    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        required = acl_1_permissions(request)
        if required is not None:
            return self._missing(account, required, host)
        return None if account.is_super else f"account {account.name} is not an administrator"

    def _missing(self, account: Account, required: Sequence[Permission], host: str) -> str | None:
        """Return the first of the ``required`` permissions that the account lacks, as a reason that its client gets;
        None if it lacks none. In ACL 1.0 the ``host`` does not matter."""
        if self._may_everything(account):
            return None
        for permission in required:
            if not self._grants[account.name].allow(permission):
                resource = f"{permission.kind.value.lower()} {permission.name}"
                return f"account {account.name} has no permission for {resource}"
        return None


def _plain_account(entry: _Lined) -> Account:
    """Return the account that an entry of ``accounts`` describes. Raises RulesError if its name or key is shorter than
    a broker demands."""
    name, secret = _text(entry, "accessKey"), _text(entry, "secretKey")
    if len(name) <= 6 or len(secret) <= 6:
        raise RulesError(
            "an account's accessKey and secretKey must have more than 6 characters each",
            hint="use those of the account at the broker, which demands the same",
        )
    pattern = _field(entry, "whiteRemoteAddress", pattern_of)
    return Account(name, secret, is_super=_field(entry, "admin", _truth), trusted_from=pattern)


def _truth(value: object) -> bool:
    found = _IS_TRUE.get(text_of(value).lower())
    if found is None:
        raise RulesError("the value of admin is neither true nor false", hint="write admin: false")
    return found


def _granted(value: object) -> frozenset[Action]:
    """Return the actions that a permission of ACL 1.0 such as ``PUB|SUB`` allows: none for DENY, or if nothing is
    written. Raises RulesError for an unknown word."""
    text = text_of(value) or "DENY"
    words = [word.strip() for word in text.split("|")]
    for word in words:
        if word not in _WORDS or (word == "DENY" and len(words) > 1):
            raise RulesError(
                f"permission {shortened(ascii(text))} is unknown", hint="use DENY, ANY, PUB, SUB or PUB|SUB"
            )
    return frozenset[Action]().union(*(_WORDS[word] for word in words))


def _named(entry: _Lined, names: str) -> dict[str, frozenset[Action]]:
    """Return the actions that an account may take on each topic or group that it names; ``names`` is the name of the
    list, topicPerms or groupPerms. Raises RulesError."""
    granted: dict[str, frozenset[Action]] = {}

    def read(item: object) -> None:
        """Add the actions of ``item``, one NAME=PERMISSION of the list, to ``granted``. Raises RulesError."""
        name, _, permission = (part.strip() for part in text_of(item).partition("="))
        if not name or not permission or "*" in name:
            raise RulesError(
                f"permission {shortened(ascii(text_of(item)))} is not NAME=PERMISSION with a whole name, without *",
                hint="for topics or groups without a name here set defaultTopicPerm or defaultGroupPerm",
            )
        kind = names.removesuffix("Perms")
        if _checked_name(kind, name) in granted:
            raise RulesError(f"{kind} {name} has two permissions in {names}", hint="remove one of them")
        granted[name] = _granted(permission)

    _each(entry, names, read)
    return granted


# -- ACL 2.0 ------------------------------------------------------------------------------------------------------

_ACTIONS = {action.value.lower(): frozenset({action}) for action in Action} | {
    "all": frozenset(Action),
    "any": frozenset(Action),
}
_USER = "username password userType userStatus"
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
        """The entry as a line for people: resource, decision, actions and addresses."""
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

    def __init__(self, document: _Lined) -> None:
        """Read the users and policies of ``document``, the content of a file. Raises RulesError for any that is not
        valid."""
        super().__init__()
        _mapping(document, "users acls")
        _each(document, "users", lambda found: self._add(_user(found), "user"))
        self._custom: dict[str, list[RuleEntry]] = {}
        self._default: dict[str, list[RuleEntry]] = {}
        _each(document, "acls", self._read_acl)

    def _read_acl(self, found: Any) -> None:
        """Add the policies that ``found``, one entry of ``acls``, has for a user. Raises RulesError."""
        acl = _mapping(found, "subject policies")
        subject = _text(acl, "subject")
        prefix, _, name = subject.partition(":")
        if prefix != "User" or name not in self.accounts:
            raise RulesError(
                f"subject {shortened(ascii(subject))} of a policy is not a user in this file",
                hint="write User:NAME with the username of an entry of users, or add that user",
            )
        _each(
            acl, "policies", lambda policy: self._read_policy(self.accounts[name], policy), is_required=True
        )

    def _read_policy(self, account: Account, found: Any) -> None:
        """Add the entries of ``found``, a policy of an account, and sort them so that the most specific decides. Raises
        RulesError, also for a Deny for a Super user, as it would have no effect."""
        policy = _mapping(found, "policyType entries")
        policy_type = _text(policy, "policyType").lower()
        if policy_type not in ("", "custom", "default"):
            raise RulesError(
                f"policyType {shortened(ascii(policy_type))} is unknown", hint="use Custom or Default"
            ).at(policy.lines["policyType"])
        entries = _each(policy, "entries", _entry, is_required=True)
        if account.is_super and not all(entry.allows for entry in entries):
            raise RulesError(
                f"a Deny for user {account.name} has no effect: a Super user may do everything",
                hint="write userType: Normal for this user, or remove the Deny",
            )
        target = self._default if policy_type == "default" else self._custom
        target[account.name] = sorted(target.get(account.name, []) + entries, key=lambda entry: entry.rank)

    def _explained(self, name: str) -> list[str]:
        return [entry.text for entries in (self._custom, self._default) for entry in entries.get(name, ())]

    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        if account.is_super:
            return None
        required = permissions_for(request)
        if required is None:
            return f"account {account.name} is not a super user, as {request_name(request.code)} requires"
        return self._missing(account, required, host)

    def _missing(self, account: Account, required: Sequence[Permission], host: str) -> str | None:
        """Return the first of the ``required`` permissions that the account lacks at ``host``, as a reason that its
        client gets; None if it lacks none."""
        if account.is_super:
            return None
        for permission in required:
            if not self._allows(account.name, permission, host):
                resource = f"{permission.kind.value.lower()} {permission.name}"
                return f"account {account.name} has no permission for {resource} from {host}"
        return None

    def _allows(self, name: str, required: Permission, host: str) -> bool:
        for entries in (self._custom, self._default):
            for entry in entries.get(name, ()):
                if entry.matches(required, host):
                    return entry.allows
        return False


def _user(found: Any) -> Account:
    """Return the account that ``found``, one entry of ``users``, describes. Raises RulesError."""
    entry = _mapping(found, _USER)
    name, password = _text(entry, "username"), _text(entry, "password")
    if not name or not password:
        raise RulesError("an entry of users has no username or no password", hint="write both")
    user_type, status = _text(entry, "userType").lower(), _text(entry, "userStatus").lower()
    if user_type not in ("", "super", "normal") or status not in ("", "enable", "disable"):
        raise RulesError(
            f"user {name} has an unknown userType or userStatus",
            hint="write Super or Normal for userType, enable or disable for userStatus",
        )
    return Account(name, password, is_super=user_type == "super", is_enabled=status != "disable")


def _entry(found: Any) -> RuleEntry:
    """Return the rule that ``found``, one entry of a policy, describes. Its resource is TYPE:NAME, TYPE:PREFIX* or
    ``*``. Raises RulesError."""
    entry = _mapping(found, _ENTRY)
    resource = _text(entry, "resource")
    kind_name, _, name = ("*", "", "*") if resource == "*" else resource.partition(":")
    kind = _KINDS.get(kind_name.lower())
    prefix = name.removesuffix("*")
    if not name or "*" in prefix or (kind is None and resource != "*"):
        raise RulesError(
            f"resource {shortened(ascii(resource))} of a policy does not parse",
            hint="write Topic:NAME, Group:PREFIX*, Cluster:* or *",
        )
    if kind in (Kind.TOPIC, Kind.GROUP) and prefix:
        _checked_name(kind.value.lower(), prefix)
    decision = _text(entry, "decision").lower()
    if decision not in ("allow", "deny"):
        raise RulesError(
            f"the entry for resource {resource} has no decision",
            hint="write decision: Allow or decision: Deny",
        )
    sources = tuple(_each(entry, "sourceIps", pattern_of))
    if "" in sources:
        raise RulesError(
            f"an address in sourceIps of resource {resource} is empty",
            hint="remove the empty entry from sourceIps, or write an address there",
        )
    actions = frozenset[Action]().union(*_each(entry, "actions", _action))
    if not actions:
        raise RulesError(
            f"the entry for resource {resource} has no actions",
            hint="write its actions, such as actions: [All]",
        )
    if kind is Kind.CLUSTER and decision == "deny":
        name = prefix = "*"  # requests do not name a cluster, so that a Deny for one is a Deny for any
    return RuleEntry(
        kind, prefix.removesuffix("*"), not name.endswith("*"), actions, sources, decision == "allow"
    )


def _action(value: object) -> frozenset[Action]:
    """Return the actions that a word of a policy's entry stands for: one, or with All and Any each. Raises
    RulesError."""
    found = _ACTIONS.get(text_of(value).lower())
    if found is None:
        names = ", ".join(action.value for action in Action)
        raise RulesError(
            f"action {shortened(ascii(text_of(value)))} is unknown", hint=f"write All, Any or one of {names}"
        )
    return found


FILE_BYTES_MAX = 16 * 1024 * 1024


def read_rules(path: Path) -> Rules:
    """Read the rules in a file: those of ACL 1.0 if it has ``accounts``, users and policies of 5.x if it has ``users``.
    Raises UsageError, with the line, for a file that cannot be read or is not valid; it quotes no secret."""
    try:
        check_trusted_file(path, "serve.acl_file")
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise RulesError(
            f"the access rules in {path} cannot be read: {error.strerror}",
            hint="set serve.acl_file to a file that this user may read",
        ) from error
    if len(data) > FILE_BYTES_MAX:
        raise RulesError(f"the file of access rules {path} is larger than {FILE_BYTES_MAX:,} bytes")
    try:
        return _rules_of(_Loader(data).get_single_data())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        failure = RulesError(
            "the file is not valid YAML", hint="check dashes, colons, quotes, indentation and UTF-8"
        ).at(0 if mark is None else mark.line + 1)
    except RulesError as error:
        failure = error
    raise RulesError(f"{path}: line {failure.line or 1}: {failure.message}", hint=failure.hint)


def _rules_of(document: Any) -> Rules:
    """Return the rules in ``document``, the parsed file: those of ACL 2.0 if it has users or policies, else of ACL 1.0.
    Raises RulesError."""
    names = "globalWhiteRemoteAddresses accounts users acls dataVersion"
    if document is None or not _mapping(document, names).keys() & {*names.split()[:4]}:
        raise RulesError(
            "the file has neither accounts (ACL 1.0) nor users (5.x)",
            hint="write accounts: [...] or users: [...]",
        )
    return UserAcl(document) if {"users", "acls"} & document.keys() else PlainAcl(document)


def rules_in_file(path: Path, on_reload: Callable[[bool], None] = lambda _: None) -> ReloadedFiles[Rules]:
    """The rules in the file at ``path``, which are read again when it changes. ``on_reload`` is called after each
    reload with whether it succeeded. Raises UsageError if the file is invalid at the start."""
    return ReloadedFiles([str(path)], lambda: read_rules(path), "access rules", on_reload)

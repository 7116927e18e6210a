"""Accounts and access rules, as read from a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from server.wire.request import Request
from tiered.errors import UsageError


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


class Rules(Protocol):
    """The rules of one file. Decisions are pure."""

    @property
    def accounts(self) -> dict[str, Account]:
        """By access key or user name."""
        ...

    def is_trusted(self, host: str) -> bool:
        """Whether all requests from ``host`` are allowed."""
        ...

    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        """Why ``account`` may not send ``request``, or None. Raises BadRequestError."""
        ...

    def message_refusal(self, account: Account, topic: str, host: str) -> str | None:
        """Why ``account`` may not read a message of ``topic``, or None."""
        ...


def text_of(value: object) -> str:
    """A YAML scalar as text: keys of digits may be written without quotes."""
    return "" if value is None else str(value).strip()

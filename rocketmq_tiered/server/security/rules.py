"""Accounts and access rules, as read from a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from rocketmq_tiered.server.security import addresses
from rocketmq_tiered.server.wire.request import Request
from tiered.errors import UsageError
from tiered.formats.record import Record


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


class Rules(ABC):
    """The rules of one file. Decisions are pure."""

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

    @abstractmethod
    def refusal(self, account: Account, request: Request, host: str) -> str | None:
        """Why ``account`` may not send ``request``, or None. Raises BadRequestError."""

    @abstractmethod
    def record_refusal(self, account: Account, request: Request, record: Record, host: str) -> str | None:
        """Why ``account`` may not send ``request``, which names ``record`` by its physical offset, or None."""


def text_of(value: object) -> str:
    """A YAML scalar as text: keys of digits may be written without quotes."""
    return "" if value is None else str(value).strip()


def pattern_of(value: object) -> str:
    """An address pattern. Raises RulesError if it does not parse."""
    text = text_of(value)
    if text and not addresses.is_valid(text):
        raise RulesError(f"address {text} does not parse")
    return text

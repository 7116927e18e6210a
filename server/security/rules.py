"""What a rules file comes to: who is known by which secret, and what each may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from server.wire.request import Request
from tiered.errors import UsageError


class RulesError(UsageError):
    """The file cannot be used. Never carries a secret."""


@dataclass(frozen=True)
class Account:
    """Somebody known. ``is_free``: an administrator or super user, who has every permission unless rules name some."""

    name: str
    secret: str = field(repr=False)
    is_free: bool = False
    is_enabled: bool = True
    trusted_from: str = ""
    """Address pattern: from there neither a signature nor a permission is asked for."""


class Rules(Protocol):
    """One file's."""

    @property
    def accounts(self) -> dict[str, Account]:
        """By access key or user name."""
        ...

    def trusts(self, host: str) -> bool:
        """Whether anything from ``host`` is let in."""
        ...

    def forbids(self, account: Account, request: Request, host: str) -> str | None:
        """Why ``account`` may not ask this, or None. Pure. Raises BadRequestError."""
        ...

    def forbids_message(self, account: Account, topic: str, host: str) -> str | None:
        """Why ``account`` may not be shown a message of ``topic``, or None. Pure."""
        ...


def text_of(value: object) -> str:
    """A scalar of YAML as text: keys of digits are written without quotes."""
    return "" if value is None else str(value).strip()

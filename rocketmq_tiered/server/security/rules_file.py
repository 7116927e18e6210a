"""Reads access rules from a file, and again when it changes; an invalid new file leaves the old rules in force. Logs
and errors never quote the file: it contains secrets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import yaml

from rocketmq_tiered.server.security.rules import PlainAcl, Rules, RulesError, UserAcl
from tiered.errors import UsageError
from tiered.private_directory import check_trusted_file

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
        document = yaml.safe_load(data)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else "?"
        raise RulesError(f"{path} is not YAML: line {line}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RulesError(f"{path} is not YAML") from None
    if isinstance(document, dict) and "users" in document:
        return UserAcl(document)
    if isinstance(document, dict) and ("accounts" in document or "globalWhiteRemoteAddresses" in document):
        return PlainAcl(document)
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

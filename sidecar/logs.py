"""Configures logging: JSON lines for services, plain lines for one-shot commands."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from tiered.console import escaped_json, printable

RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """A record as one JSON line. ``extra`` attributes become members; a trace is one escaped member."""

    def format(self, record: logging.LogRecord) -> str:
        """One line without line breaks."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        document: dict[str, Any] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        document.update({k: v for k, v in vars(record).items() if k not in RECORD_ATTRIBUTES})
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            document["error"] = type(error).__name__
            document["cause"] = str(error)
            if record.levelno >= logging.CRITICAL:
                document["trace"] = self.formatException(record.exc_info)  # type: ignore[arg-type]
        try:
            return escaped_json(orjson.dumps(document, default=str)).decode()
        except TypeError:
            # orjson refuses paths that are not UTF-8 and numbers of more than 64 bits.
            return json.dumps(document, default=str)


class PlainFormatter(logging.Formatter):
    """``12:00:00 WARNING message (name=value, …)``: one line for a person at a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the lines of a trace."""
        return "\n".join(map(printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """The line, followed by the ``extra`` attributes."""
        line = super().formatMessage(record)
        extra = ", ".join(
            f"{name}={value}" for name, value in vars(record).items() if name not in RECORD_ATTRIBUTES
        )
        return " ".join((f"{line} ({extra})" if extra else line).split("\n"))


def log_json(level: str) -> None:
    """Log JSON lines to stderr at ``level`` (a setting's value) and above."""
    _install(JsonFormatter(), level)


def log_plain(level: str) -> None:
    """Log plain lines to stderr, for one-shot commands."""
    _install(PlainFormatter(), level)


def _install(formatter: logging.Formatter, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # The SDK's lines may contain signed URLs; its failures are raised as typed errors.
    for name in ("botocore", "boto3", "aiobotocore", "urllib3", "s3transfer"):
        logging.getLogger(name).setLevel(logging.ERROR)

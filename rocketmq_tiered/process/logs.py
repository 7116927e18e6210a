"""Configures logging: JSON lines for services, plain lines for one-shot commands and on a terminal."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from tiered.console import RECORD_ATTRIBUTES, PlainFormatter, escaped_json


class JsonFormatter(logging.Formatter):
    """A record as one JSON line. ``extra`` attributes become members; a trace is one escaped member."""

    def format(self, record: logging.LogRecord) -> str:
        """``record`` as one line of JSON, with its extra fields as members, and with name and text of an exception;
        only a critical record has the stack trace."""
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


def log_service(level: str) -> None:
    """Log to stderr at ``level`` (a setting's value) and above: JSON lines, or plain ones if it is a terminal."""
    _install(PlainFormatter() if sys.stderr.isatty() else JsonFormatter(), level)


def log_plain(level: str) -> None:
    """Log plain lines to stderr, for one-shot commands."""
    _install(PlainFormatter(), level)


def _install(formatter: logging.Formatter, level: str) -> None:
    """Log records of ``level`` and above to stderr by ``formatter``, and nowhere else: stdout belongs to data."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # The SDK's lines may contain signed URLs; its failures are raised as typed errors.
    for name in ("botocore", "boto3", "aiobotocore", "urllib3", "s3transfer", "py4j"):
        logging.getLogger(name).setLevel(logging.ERROR)

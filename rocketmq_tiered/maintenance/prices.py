"""Prices of an object store: one table, which users replace with a TOML file of their own.

The defaults are list prices and have a date. Traffic inside a region is free there; traffic out of it is not included.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tiered.errors import AccessDeniedError, NotFoundError, UsageError

GIB = 1 << 30
DAYS_A_MONTH = 30


@dataclass(frozen=True)
class Prices:
    """Prices in ``currency``. A GiB is 2**30 bytes, which AWS calls GB. Default: S3 Standard in us-east-1, first 50 TB;
    larger archives pay a little less."""

    name: str = "AWS S3 Standard, us-east-1, list prices"
    date: str = "2025"
    currency: str = "USD"
    storage_gib_month: float = 0.023
    put_1000: float = 0.005
    """PUT, COPY, POST: also the start, each part and the end of an upload in parts."""
    get_1000: float = 0.0004
    list_1000: float = 0.005
    read_gib: float = 0.0
    """Retrieval and traffic of reads; 0 in the bucket's region."""

    def storage(self, size_bytes: float, days: float = DAYS_A_MONTH) -> float:
        """Price of ``size_bytes`` kept for ``days``."""
        return size_bytes / GIB * self.storage_gib_month * days / DAYS_A_MONTH

    def requests(self, *, puts: float = 0, gets: float = 0, lists: float = 0) -> float:
        """Price of so many requests."""
        return (puts * self.put_1000 + gets * self.get_1000 + lists * self.list_1000) / 1000

    def reads(self, size_bytes: float) -> float:
        """Price of the bytes that are read, besides that of the requests."""
        return size_bytes / GIB * self.read_gib


def read_prices(path: Path) -> Prices:
    """The table in a TOML file; a key that it lacks keeps the default. Raises UsageError naming file and key."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"price file {path} does not exist", hint="check --prices") from None
    except OSError as error:
        raise AccessDeniedError(f"cannot read {path}: {error.strerror}", hint="check --prices") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", hint="correct that line") from None
    return prices_of(document, str(path))


def prices_of(document: Mapping[str, Any], where: str) -> Prices:
    """The table in ``document``. Raises UsageError."""
    known = {item.name: type(item.default) for item in fields(Prices)}
    for key, value in document.items():
        if key not in known:
            raise UsageError(f"{key} in {where} is not a price", hint=f"the keys are {', '.join(known)}")
        is_number = (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        )
        if known[key] is float and not is_number:
            raise UsageError(f"{key} in {where} is not a price", hint="write a number, such as 0.023")
        if known[key] is str and not isinstance(value, str):
            raise UsageError(f"{key} in {where} is not text", hint=f'write {key} = "…"')
    return Prices(**document)

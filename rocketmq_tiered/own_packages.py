"""Checks that the packages installed with this one are found under their names.

A module of the user's called ``fetcher.py`` would otherwise fail deep inside, with a missing attribute.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

NAMES = ("tiered", "uploader", "fetcher")


def check_own_packages() -> None:
    """Raise ImportError if one of the packages that are installed with this one is missing, or if a file of the user's
    of the same name comes before it on ``sys.path``."""
    root = Path(__file__).parents[1]
    for name in NAMES:
        found = _origin(name)
        if found is None:
            raise ImportError(f"package {name} is missing: install rocketmq-tiered again")
        if Path(found) != root / name / "__init__.py":
            raise ImportError(
                f"{found} hides package {name} of rocketmq-tiered: rename that file", name=name, path=found
            )


def _origin(name: str) -> str | None:
    """The file that ``import name`` loads, or has loaded."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    spec = find_spec(name)
    return spec.origin if spec is not None else None

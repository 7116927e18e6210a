"""Names of a package that are imported when they are first used, so that importing the package is cheap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], object], Callable[[], Sequence[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of ``package`` (PEP 562).

    ``homes`` maps a module to the names that it defines, ``renamed`` a name to ``module:name``.
    """
    origins = {name: f"{module}:{name}" for module, names in homes.items() for name in names}
    origins.update(renamed)

    def load(name: str) -> object:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = origins[name].partition(":")
        value: object = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *origins})

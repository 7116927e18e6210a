"""Names of a package that are imported when they are first used, so that importing the package is cheap."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], object], Callable[[], Sequence[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` (PEP 562) for ``package``, which import a module when one of its
    names is first used.

    ``homes`` maps a module to the names that it gives to the package, ``renamed`` another name to ``module:name``.
    """
    origins = {name: f"{module}:{name}" for module, names in homes.items() for name in names}
    origins.update(renamed)

    def load(name: str) -> object:
        """Import the module that has ``name`` and keep the value in the package, so that this is not called again."""
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = origins[name].partition(":")
        value: object = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *origins})

"""``pyarrow.dataset.Dataset`` without pandas, which its import would load for nothing: a third of a command's start."""

from __future__ import annotations

import sys


class _NoPandas:
    """Hides pandas from the import below; ``.df()`` loads it when it is wanted."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Called by the import system."""
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)


_hides = _NoPandas()
sys.meta_path.insert(0, _hides)
try:
    from pyarrow.dataset import Dataset
finally:
    sys.meta_path.remove(_hides)

__all__ = ["Dataset"]

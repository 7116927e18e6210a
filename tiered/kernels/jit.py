"""How kernels are compiled: on first call, cached on disk, mostly without the interpreter lock.

Owns the decorators ``kernel``, ``short_kernel`` and ``intrinsic``. They defer ``import numba`` (most of a second)
to the first call, so that a command which runs no kernel starts fast, and they tie the on-disk cache to every
source file of this package: numba alone looks only at the file of the outermost function, and would run stale
code after a callee in another file changed.

Does not own any loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from threading import RLock
from typing import Any, TypeAlias, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

Int: TypeAlias = Any
"""An int64 inside a kernel: numpy scalars and ints mix there, which static types cannot follow."""

_compile_lock = RLock()
_types_registered = False


class Kernel:
    """A function that numba compiles when it is first called, by Python or by a kernel being compiled.

    ``py_func`` is the plain function; it runs in the interpreter only where it calls no intrinsic.
    """

    def __init__(self, function: Callable[..., Any], *, nogil: bool = True) -> None:
        self.py_func = function
        self._nogil = nogil
        self._dispatcher: Any = None
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return (self._dispatcher or self.dispatcher())(*args)

    def dispatcher(self) -> Any:
        """The numba dispatcher, made on first use."""
        with _compile_lock:
            if self._dispatcher is None:
                _register_types()
                self._dispatcher = _cached_dispatcher(self.py_func, self._nogil)
            return self._dispatcher


class Intrinsic:
    """A typing-and-code-generation function given to numba when a kernel that uses it is compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._intrinsic: Any = None
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self._function.__name__} exists only inside kernels")

    def numba_type(self) -> Any:
        """The numba type of the callable."""
        from numba.core.registry import cpu_target
        from numba.extending import intrinsic as numba_intrinsic

        if self._intrinsic is None:
            self._intrinsic = numba_intrinsic(self._function)
            cpu_target.typing_context.refresh()  # the registration just made is otherwise seen too late
        return cpu_target.typing_context.resolve_value_type(self._intrinsic)


def kernel(function: F) -> F:
    """Decorate a loop over arrays and ints: compiled lazily, ``nogil``, cached, never bounds-checked."""
    return cast(F, Kernel(function))


def short_kernel(function: F) -> F:
    """As ``kernel``, but it keeps the interpreter lock: for calls that take less than getting the lock back does."""
    return cast(F, Kernel(function, nogil=False))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``f(typing_context, *types) -> (signature, codegen)``, as numba's own decorator, lazily."""
    return Intrinsic(function)


def _register_types() -> None:
    """Teach numba that a global naming a Kernel or an Intrinsic means the compiled thing."""
    global _types_registered  # noqa: PLW0603 - numba's own registry is global
    if _types_registered:
        return
    from numba.core import types
    from numba.extending import typeof_impl

    @typeof_impl.register(Kernel)
    def _typeof_kernel(value: Kernel, _context: Any) -> Any:
        return types.Dispatcher(value.dispatcher())

    @typeof_impl.register(Intrinsic)
    def _typeof_intrinsic(value: Intrinsic, _context: Any) -> Any:
        return value.numba_type()

    _types_registered = True


def _cached_dispatcher(function: Callable[..., Any], nogil: bool) -> Any:
    import numba

    options = {"nogil": nogil, "error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        dispatcher = numba.njit(function, cache=True, **options)
    except RuntimeError:  # no directory is writable: compile in every process rather than fail
        return numba.njit(function, **options)
    cache_file = dispatcher._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, _PACKAGE_STAMP)
    return dispatcher


def _package_stamp() -> tuple[tuple[str, int, int], ...]:
    """Name, modification time and size of every source file here: what a compiled kernel may depend on."""
    stats = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


_PACKAGE_STAMP = _package_stamp()
"""Of the files as they are imported: taken later, a process that runs while they are replaced would leave its old code
under the new ones' stamp."""

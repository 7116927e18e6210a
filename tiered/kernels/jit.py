"""Compiles kernels with numba on the first call, without the interpreter lock, cached on disk.

A command that runs no kernel never imports numba, which takes a quarter of a second. The cache directory is named by
the contents of this package: numba itself only notices changes in the file of the outermost function.

Kernels that ``compiled_ahead`` has compiled into the package are found first, also where nothing is writable.
"""

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from pathlib import Path
from threading import RLock
from typing import Any, TypeAlias, TypeVar, cast

from tiered.errors import AccessDeniedError
from tiered.private_directory import check_files, check_private, exposed_parent, make_private

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

Int: TypeAlias = Any
"""An int64 inside a kernel: numpy scalars and ints mix there, which static types cannot follow."""

_PACKAGE = Path(__file__).parent
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_PACKAGE.glob("*.py")))).hexdigest()
"""Taken at import: a process that runs on while its files are replaced must not cache old code as new."""
AHEAD = _PACKAGE / "__pycache__" / f"ahead-{_SOURCES[:16]}"
"""Kernels compiled at the installation. All users read them; only who owns the installation writes them."""
_lock = RLock()
_compiling: list[str] = []
"""Names of the kernels that are being compiled, innermost last."""


class Deferred:
    """A function that numba wraps on first use, by Python or by a kernel that is being compiled."""

    def __init__(self, function: Callable[..., Any], wrap: Callable[..., Any]) -> None:
        self._function, self._wrap = function, wrap
        self._wrapped: Any = None
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return (self._wrapped or self.wrapped())(*args)

    def wrapped(self) -> Any:
        """The object that numba makes of the function, made at the first call. Kernels that the function calls are
        replaced, in its module, by what numba made of them: numba compiles calls of its own objects only."""
        with _lock:
            if self._wrapped is None:
                names = self._function.__globals__
                for name in self._function.__code__.co_names:
                    if isinstance(names.get(name), Deferred):
                        names[name] = names[name].wrapped()
                self._wrapped = self._wrap(self._function)
            return self._wrapped


def kernel(function: F) -> F:
    """Decorate a loop over arrays and integers. Indices are not checked against bounds."""
    return cast(F, Deferred(function, _njit))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``f(typing_context, *types) -> (signature, codegen)``, as ``numba.extending.intrinsic``."""
    return Deferred(function, _intrinsic)


def _intrinsic(function: Callable[..., Any]) -> Any:
    from numba import extending

    return extending.intrinsic(function)


def compiling() -> str:
    """The kernel that this process is compiling; empty if none. From any thread."""
    return next(iter(_compiling[:1]), "")


@cache
def _observe_compilation() -> None:
    """Follow numba's compilations from now on: ``compiling`` names the kernel that is compiled, for the status page,
    and the first compilation is logged, as the start takes longer."""
    from numba.core import event

    class Observer(event.Listener):  # type: ignore[misc, unused-ignore]
        def on_start(self, event: Any) -> None:
            if not self.has_logged:
                logger.info(
                    "kernels are compiled, as no cache has them: this start takes about a minute longer"
                )
            self.has_logged = True
            _compiling.append(event.data["dispatcher"].py_func.__name__)

        def on_end(self, event: Any) -> None:
            _compiling.pop()

        has_logged = False

    event.register("numba:compile", Observer())


def _njit(function: Callable[..., Any]) -> Any:
    """numba's wrapper of ``function``, which compiles it at the first call with new argument types, unless a cache has
    it: first the kernels that were compiled at the installation, then the user's own cache. numba's global setting for
    its cache directory is changed only while the wrapper is made."""
    import numba

    _observe_compilation()
    configured = numba.config.CACHE_DIR
    directory = numba.config.CACHE_DIR = _writes_ahead or _cache_directory(configured)
    try:
        dispatcher = numba.njit(function, nogil=True, cache=directory != "", error_model="numpy")
        if not _writes_ahead and _has_ahead():
            numba.config.CACHE_DIR = str(AHEAD)
            dispatcher._cache = _compiled_first(function, dispatcher._cache)
        return dispatcher
    finally:
        numba.config.CACHE_DIR = configured


_writes_ahead = ""


@contextmanager
def compiled_ahead() -> Iterator[Path]:
    """Within this context, which a process of its own uses at the installation, kernels are compiled into the directory
    ``AHEAD``, from which later processes load them. Yields it, and leaves it readable for all users. Raises
    AccessDeniedError if others can write it, and OSError where it cannot be written."""
    global _writes_ahead  # noqa: PLW0603
    AHEAD.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_private(AHEAD, "NUMBA_CACHE_DIR")
    _writes_ahead = str(AHEAD)
    try:
        yield AHEAD
    finally:
        _writes_ahead = ""
        for path in (AHEAD.parent, AHEAD, *AHEAD.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


@cache
def _has_ahead() -> bool:
    """Whether there are kernels compiled ahead that only this user or root can have written."""
    try:
        if not AHEAD.exists():
            return False
        check_private(AHEAD, "NUMBA_CACHE_DIR")
        _refuse_exposed(AHEAD)
        check_files(AHEAD, "NUMBA_CACHE_DIR")
    except AccessDeniedError as error:
        logger.warning(
            "the kernels that were compiled at the installation are not used, and compiled again: %s", error
        )
        return False
    except OSError:
        return False
    return True


def _compiled_first(function: Callable[..., Any], own: Any) -> Any:
    """A cache for the compiled ``function`` that looks in the directory that numba is configured with at present, the
    kernels compiled at the installation, and then in ``own``, numba's cache in the user's directory. What is compiled
    goes to ``own`` only: numba's usual cache would have to write the first one. Machine code is loaded without all that
    numba needs to compile, whose import takes as long as numba's own."""
    from numba.core import caching
    from numba.core.runtime import rtsys

    class Locator(caching.UserProvidedCacheLocator):  # type: ignore[misc, unused-ignore]
        def ensure_cache_path(self) -> None:
            return

    class Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc, unused-ignore]
        _locator_classes = (Locator,)

    class CompiledFirst(caching.FunctionCache):  # type: ignore[misc, unused-ignore]
        _impl_class = Implementation

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            rtsys.initialize(target_context)
            compiled = self._load_overload(sig, target_context)
            return own.load_overload(sig, target_context) if compiled is None else compiled

        def save_overload(self, sig: Any, data: Any) -> None:
            own.save_overload(sig, data)

    return CompiledFirst(function)


@cache
def _cache_directory(configured: str) -> str:
    """The directory in which numba caches the kernels of these sources: below ``configured``, or, if that is empty,
    beside the sources or in the user's cache. "" if none of them can be written, or other users can write it: numba
    unpickles what it finds there, which runs code. Then each process compiles for itself."""
    user = Path("~/.cache/rocketmq-tiered")
    refusals: list[AccessDeniedError] = []
    for parent in [Path(configured)] if configured else [_PACKAGE / "__pycache__", user]:
        try:
            directory = parent.expanduser() / f"kernels-{_SOURCES[:16]}"
            make_private(directory, "NUMBA_CACHE_DIR")
            _refuse_exposed(directory)
            check_files(directory, "NUMBA_CACHE_DIR")
            tempfile.TemporaryFile(dir=directory).close()
        except AccessDeniedError as error:
            refusals.append(error)
            continue
        except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
            continue
        return str(directory)
    for refusal in refusals:
        logger.warning("kernels are compiled in every process, without a cache: %s", refusal)
    return ""


def _refuse_exposed(directory: Path) -> None:
    exposed = exposed_parent(directory)
    if exposed is not None:
        raise AccessDeniedError(
            f"{exposed} can be written by other users, who can replace {directory}",
            hint=f"chmod o-w {exposed}, or set NUMBA_CACHE_DIR",
        )

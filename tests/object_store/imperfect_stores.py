"""Object stores with one defect each, as gateways have them."""

import time
from collections.abc import Iterator, Sequence

from tiered.errors import AccessDeniedError, AlreadyExistsError
from tiered.object_store.interface import Body, ObjectInfo, ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.wrapper import StoreWrapper


class _InMemory(StoreWrapper):
    def __init__(self, store: ObjectStore | None = None) -> None:
        super().__init__(store or MemoryStore())


class RacyStore(_InMemory):
    """Refuses a create that follows another one, but lets concurrent ones replace each other."""

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        if any(info.key == key for info in self._store.list(key)):
            raise AlreadyExistsError(f"{key} exists")
        time.sleep(0.02)
        self._store.delete([key])
        try:
            self._store.put_if_absent(key, body)
        except AlreadyExistsError:
            return


class OverwritingStore(_InMemory):
    """Replaces objects that exist."""

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._store.delete([key])
        self._store.put_if_absent(key, body)


class RangelessStore(_InMemory):
    """Returns the whole object for a range."""

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._store.get(key, 1 << 20)


class UnsortedStore(_InMemory):
    """Lists in another order than that of the keys' bytes."""

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        found = list(self._store.list(prefix, start_after=start_after, limit=limit))
        return iter(sorted(found, key=lambda info: info.key.lower()))


class ForgetfulStore(_InMemory):
    """Lists without the object that was written last."""

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        return iter(list(self._store.list(prefix, start_after=start_after, limit=limit))[:-1])


class ReadOnlyStore(_InMemory):
    """A directory that may not be written: its clock is that of a file written there."""

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        raise AccessDeniedError(f"{self.url}/{key}: Read-only file system", hint="mount it for writing")

    def clock_ms(self, prefix: str = "") -> int:
        raise AccessDeniedError(f"{self.url}: Read-only file system", hint="mount it for writing")


class UndeletableStore(_InMemory):
    """Denies deletion."""

    def delete(self, keys: Sequence[str]) -> None:
        raise AccessDeniedError(f"{self.url}/{keys[0]}: s3:DeleteObject: AccessDenied", hint="allow it")

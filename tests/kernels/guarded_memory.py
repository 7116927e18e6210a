"""Memory that ends at an unreadable page: reading one byte too many kills the process instead of passing."""

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class GuardedMemory:
    """Room for up to ``capacity`` bytes, followed by a page that cannot be read."""

    def __init__(self, capacity: int) -> None:
        pages = -(-capacity // mmap.PAGESIZE)
        self._map = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.capacity = pages * mmap.PAGESIZE
        guard = self._bytes.ctypes.data + self.capacity
        if _libc.mprotect(guard, mmap.PAGESIZE, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, data: bytes) -> NDArray[np.uint8]:
        """An array holding ``data`` whose last byte is the last readable one."""
        assert len(data) <= self.capacity
        array = self._bytes[self.capacity - len(data) : self.capacity]
        array[:] = np.frombuffer(data, np.uint8)
        return array

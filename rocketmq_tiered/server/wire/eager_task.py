"""Starts a coroutine at once instead of in the next iteration of the event loop.

A pull answered from memory never waits: started eagerly it costs no task, no callback and no loop iteration. asyncio
has this from Python 3.12 on. For 3.11 the first step runs outside a task, and the rest becomes one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Generator
from typing import Any


def begin(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """The rest of ``coroutine`` as a task, or None if it finished without waiting. Raises what its first step raises.

    On Python 3.11 ``asyncio.current_task()`` is another task until the first wait.
    """
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        task = asyncio.Task(coroutine, loop=loop, eager_start=True)
        if not task.done():
            return task
        task.result()
        return None
    try:
        wait = coroutine.send(None)
    except StopIteration:
        return None
    return loop.create_task(_rest(coroutine, wait))


async def _rest(coroutine: Coroutine[Any, Any, None], wait: Any) -> None:
    await _Begun(coroutine, wait)


class _Begun:
    """Awaits the rest of a coroutine that is waiting for ``wait``."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], wait: Any) -> None:
        self._coroutine, self._wait = coroutine, wait

    def __await__(self) -> Generator[Any, Any, None]:
        coroutine, wait = self._coroutine, self._wait
        try:
            while True:
                try:
                    value = yield wait
                except BaseException as error:
                    wait = coroutine.throw(error)
                else:
                    wait = coroutine.send(value)
        except StopIteration:
            return
        finally:
            coroutine.close()

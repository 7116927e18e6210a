"""What tests of the server begin with."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.proxy.proxy_pulls import Scene, beside_a_broker


@pytest.fixture
def with_files() -> bool:
    """Whether the broker's files can be read; tests have parameters of this name for both."""
    return True


@pytest.fixture
async def scene(tmp_path: Path, with_files: bool) -> AsyncIterator[Scene]:
    """A queue half in the archive, half at the broker."""
    async with beside_a_broker(tmp_path, with_files=with_files) as made:
        yield made

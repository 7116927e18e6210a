"""Archives copied from a directory to an object store server."""

from pathlib import Path

from tests.servers.running_store import RunningStore
from tiered.object_store.open_store import open_store


def uploaded(archives: Path, server: RunningStore) -> str:
    """The archives in a bucket of their own."""
    url = f"{server.fresh_bucket()}/archives"
    store = open_store(url, server.options())
    for path in sorted(path for path in archives.rglob("*") if path.is_file()):
        store.put_if_absent(path.relative_to(archives).as_posix(), [path.read_bytes()])
    store.close()
    return url

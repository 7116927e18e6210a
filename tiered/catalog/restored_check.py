"""Shows that a restored commitlog continues its archive, though its last bytes differ from those that were archived.

Each commit has a checksum of the last bytes of the log (its check), and a writer compares these with its own log. A
restored log has fillers in place of records that were not archived, so that its checksum may be another. So a restore
leaves a file in the store directory: the commit up to which it restored, that commit's check, and the check of the
restored log at the same place. A writer compares its log with the latter in place of that commit's check.
"""

import json
from pathlib import Path
from typing import Final, NamedTuple

from tiered.catalog.catalog_reader import read_commit
from tiered.catalog.json_fields import fields, row
from tiered.catalog.state import LogCheck
from tiered.errors import CorruptionError, NotFoundError
from tiered.object_store.interface import ObjectStore
from tiered.residency import open_failure

RESTORED: Final = "tiered-restored.json"
"""The name of that file in the store directory."""


class RestoredCheck(NamedTuple):
    """Checksums of the log's last bytes at the commit up to which a store was restored: ``archived`` as commit
    ``version``, whose put id is ``put_id``, has it, and ``own`` of the restored log."""

    version: int
    put_id: str
    archived: LogCheck
    own: LogCheck

    def encode(self) -> bytes:
        """The content of the file that a restore leaves."""
        return json.dumps(self._asdict()).encode()

    def of(self, check: LogCheck) -> LogCheck:
        """The check that the log must have where a commit has ``check``: the restored log's own one if it is that of
        the commit up to which the log was restored."""
        return self.own if check == self.archived else check


NOT_RESTORED: Final = RestoredCheck(0, "", LogCheck(0, 0, 0), LogCheck(0, 0, 0))


def restored_check(store_path: Path, archive: ObjectStore) -> RestoredCheck:
    """The checksums that ``tiered restore`` left in the store directory ``store_path``; NOT_RESTORED if it left none,
    or restored from another archive than ``archive``. Raises CorruptionError, or what reading raises."""
    path = store_path / RESTORED
    try:
        recorded = fields(json.loads(path.read_bytes()))
        check = row(RestoredCheck, [recorded[name] for name in RestoredCheck._fields])
    except FileNotFoundError:
        return NOT_RESTORED
    except OSError as error:
        raise open_failure(path, error) from error
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{path}, which tiered restore wrote, is damaged: {error!r}", hint="remove this file"
        ) from error
    try:
        # Versions are numbers that every archive has; the put id is unique.
        is_of_archive = read_commit(archive, check.version).put_id == check.put_id
    except NotFoundError:
        is_of_archive = False
    return check if is_of_archive else NOT_RESTORED

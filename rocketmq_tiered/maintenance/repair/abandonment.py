"""Begins a new archive where objects of a lost one are: these are kept in quarantine, and named by its first commit."""

from collections.abc import Iterable

from rocketmq_tiered.maintenance.repair.repair import Repair, apply_repair, number_above
from rocketmq_tiered.maintenance.repair.survey import survey
from tiered.archive.found_objects import found_objects
from tiered.catalog.catalog_reader import head_version
from tiered.catalog.holdings import REPAIR_HINT, objects_below
from tiered.catalog.state import CatalogState
from tiered.console import counted
from tiered.errors import CatalogLostError
from tiered.formats.keys import DATA_PREFIX, SETS_PREFIX
from tiered.object_store.interface import ObjectInfo, ObjectStore


def abandon(store: ObjectStore, names: tuple[str, str], count: int | None, now_ms: int) -> None:
    """Begin a new archive of ``names`` (cluster, broker) beside the objects of one whose catalog is lost: its first
    commit, above all versions and epochs in the names of these objects, keeps them in quarantine. Does nothing if there
    is a commit, or no object.

    Raises CatalogLostError unless there are ``count`` objects, as the operator has confirmed with --abandon, and
    UnsupportedFormatError.
    """
    if head_version(store):
        return
    infos = [info for _, info in objects_below(store)]
    if not infos:
        return
    if len(infos) != count:
        raise CatalogLostError(
            f"the catalog of {store.url} is lost: it holds {counted(len(infos), 'object')}, and no commit names them",
            hint=f"{REPAIR_HINT}; to abandon them and begin a new archive beside them, start once with --new-archive "
            f"--abandon {len(infos)}",
        )
    surveyed = survey(store)
    state = CatalogState(cluster=names[0], broker=names[1])
    repair = Repair(
        store, surveyed, state, applies=True, now_ms=now_ms, version=surveyed.version, epoch=surveyed.epoch
    )
    number_above(repair, (one for _, one in found_objects(store, _data(infos)) if one is not None))
    repair.survey.state = state
    repair.quarantined = {info.key for info in infos}
    repair.unknown.append(
        f"it is not known which messages are in the {counted(len(infos), 'object')} that --abandon moved to "
        "quarantine"
    )
    apply_repair(repair)


def _data(infos: Iterable[ObjectInfo]) -> Iterable[ObjectInfo]:
    return (info for info in infos if info.key.startswith((DATA_PREFIX, SETS_PREFIX)))

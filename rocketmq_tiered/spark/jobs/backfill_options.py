"""Options of a bulk backfill and its report of each store. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tiered.model.queue import TopicFilter
from tiered.object_store.store_options import StoreOptions
from tiered.settings.sections import IndexSettings, OffloadSettings, ProcessSettings
from tiered.settings.topic_rules import TopicRules
from uploader.offload_status import OffloadResult

Report = Callable[[str, int, int], None]
"""(store directory, bytes of commitlog done, total bytes)."""


@dataclass(frozen=True)
class StoreToBackfill:
    """A store directory. Names and configuration are optional if the store contains them."""

    path: str
    cluster: str = ""
    broker: str = ""
    conf_path: str = ""


@dataclass(frozen=True)
class BackfillOptions:
    """Options for all stores. ``topics``: include, exclude and system topics; broker names are filled in.

    ``outage_limit_s``: how long the object store may refuse every request.
    """

    topics: TopicFilter = field(default_factory=TopicFilter)
    settings: OffloadSettings = field(default_factory=OffloadSettings)
    index: IndexSettings = field(default_factory=IndexSettings)
    rules: TopicRules = field(default_factory=TopicRules)
    store: StoreOptions = field(default_factory=StoreOptions)
    outage_limit_s: float = ProcessSettings.patience_ms / 1000
    take_over: bool = False
    replace_log: bool = False
    same_broker: bool = False


@dataclass(frozen=True, kw_only=True)
class BackfillReport(OffloadResult):
    """The result for one store directory."""

    path: str
    cluster: str
    broker: str

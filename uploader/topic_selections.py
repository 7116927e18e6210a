"""Which topics each part of the log was archived with: a gap is explained by a selection that excluded its topic.

An archive-wide setting lists [first physical offset, include, exclude, include_system]; without one, all topics but the
broker's own were selected. Values only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tiered.catalog.state import CatalogState
from tiered.model.queue import TopicFilter

SELECTIONS = "topic_selections"
SELECTIONS_MAX = 32
"""Changes that are kept, the newest ones: a gap has the selection of the last restarts."""


class TopicSelection(NamedTuple):
    """What was selected from physical offset ``from_phys`` on."""

    from_phys: int
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    include_system: bool = False


@dataclass(frozen=True)
class TopicSelections:
    """The selections of topics that were or are in force, in the order of the log; the last one is ``topics``."""

    topics: TopicFilter
    entries: tuple[TopicSelection, ...] = (TopicSelection(0),)

    @classmethod
    def at(cls, state: CatalogState, topics: TopicFilter, phys: int) -> TopicSelections:
        """The selections that ``state`` records, followed by ``topics``, the present one, for the log from commitlog
        offset ``phys`` on."""
        recorded = [earlier for earlier in _read(state.settings) if earlier.from_phys < phys]
        recorded = recorded or [TopicSelection(0)]
        present = TopicSelection(phys, tuple(topics.include), tuple(topics.exclude), topics.include_system)
        if recorded[-1][1:] != present[1:]:
            recorded.append(present)
        return cls(topics, tuple(recorded[-SELECTIONS_MAX:]))

    def setting(self, state: CatalogState) -> dict[str, list[TopicSelection]]:
        """What the next commit after ``state`` records; empty if nothing changed."""
        recorded = _read(state.settings) or (TopicSelection(0),)
        return {} if recorded == self.entries else {SELECTIONS: list(self.entries)}

    def excluded(self, topic: str, begin_phys: int, end_phys: int) -> bool:
        """Whether a selection excluded ``topic`` that was in force anywhere between two offsets of the commitlog."""
        ends = [*(later.from_phys for later in self.entries[1:]), end_phys]
        return any(
            selection.from_phys < end_phys and end > begin_phys and self._is_refused(selection, topic)
            for selection, end in zip(self.entries, ends, strict=True)
        )

    def absent(self, topics: Iterable[str], end_phys: int) -> list[str]:
        """Those of ``topics`` that are selected now, and were excluded from the log before ``end_phys``."""
        return sorted(
            topic for topic in set(topics) if self.topics.admits(topic) and self.excluded(topic, 0, end_phys)
        )

    def _is_refused(self, selection: TopicSelection, topic: str) -> bool:
        _, include, exclude, include_system = selection
        chosen = replace(self.topics, include=include, exclude=exclude, include_system=include_system)
        return not chosen.admits(topic)


def _read(settings: Mapping[str, Any]) -> tuple[TopicSelection, ...]:
    return tuple(
        TopicSelection(int(phys), tuple(include), tuple(exclude), bool(include_system))
        for phys, include, exclude, include_system in settings.get(SELECTIONS, ())
    )

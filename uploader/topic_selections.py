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
    """Selections in the order of the log, the last one ``topics``, which is in force."""

    topics: TopicFilter
    entries: tuple[TopicSelection, ...] = (TopicSelection(0),)

    @classmethod
    def at(cls, state: CatalogState, topics: TopicFilter, phys: int) -> TopicSelections:
        """Those of ``state``, continued with ``topics`` at ``phys``."""
        known = [one for one in _read(state.settings) if one.from_phys < phys] or [TopicSelection(0)]
        now = TopicSelection(phys, tuple(topics.include), tuple(topics.exclude), topics.include_system)
        if known[-1][1:] != now[1:]:
            known.append(now)
        return cls(topics, tuple(known[-SELECTIONS_MAX:]))

    def setting(self, state: CatalogState) -> dict[str, list[TopicSelection]]:
        """What the next commit after ``state`` records; empty if nothing changed."""
        known = _read(state.settings) or (TopicSelection(0),)
        return {} if known == self.entries else {SELECTIONS: list(self.entries)}

    def excluded(self, topic: str, begin_phys: int, end_phys: int) -> bool:
        """Whether a selection in force between two offsets of the log excluded ``topic``."""
        ends = [*(one.from_phys for one in self.entries[1:]), end_phys]
        return any(
            one.from_phys < end_phys and end > begin_phys and self._is_refused(one, topic)
            for one, end in zip(self.entries, ends, strict=True)
        )

    def absent(self, topics: Iterable[str], end_phys: int) -> list[str]:
        """Those of ``topics`` that are selected now, and were excluded from the log before ``end_phys``."""
        return sorted(
            topic for topic in set(topics) if self.topics.admits(topic) and self.excluded(topic, 0, end_phys)
        )

    def _is_refused(self, one: TopicSelection, topic: str) -> bool:
        chosen = replace(
            self.topics, include=one.include, exclude=one.exclude, include_system=one.include_system
        )
        return not chosen.admits(topic)


def _read(settings: Mapping[str, Any]) -> tuple[TopicSelection, ...]:
    return tuple(
        TopicSelection(int(phys), tuple(include), tuple(exclude), bool(include_system))
        for phys, include, exclude, include_system in settings.get(SELECTIONS, ())
    )

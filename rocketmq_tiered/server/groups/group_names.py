"""Names of consumer groups that a broker accepts. Pure.

A broker creates a configuration for each new group, unless its name is longer than 255 characters or has other
characters: such a group does not exist. Existing groups are not checked.

Sources: SubscriptionGroupManager.findSubscriptionGroupConfig, TopicValidator.isTopicOrGroupIllegal of 5.3 (5.5 allows
120 characters for new groups, 4.9 leaves the rule to its clients: Validators.checkGroup).
"""

from __future__ import annotations

import re
from typing import Final

GROUP_CHARS_MAX: Final = 255
_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


def is_legal_group(name: str) -> bool:
    """Whether a broker creates a group of this name."""
    return len(name) <= GROUP_CHARS_MAX and _LEGAL.fullmatch(name) is not None

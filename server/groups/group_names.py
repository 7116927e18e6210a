"""Which names of consumer groups a broker would have taken.

A broker makes a configuration for every group that asks, unless its name is longer than 255 characters or has others
than its rule allows: that one does not exist, and is answered so. Groups it had already are not judged again.

Pure. Sources: SubscriptionGroupManager.findSubscriptionGroupConfig, TopicValidator.isTopicOrGroupIllegal of 5.3 (5.5
allows new groups 120 characters, 4.9 leaves the same rule to its clients: Validators.checkGroup).
"""

from __future__ import annotations

import re
from typing import Final

GROUP_CHARS_MAX: Final = 255
_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


def is_legal_group(name: str) -> bool:
    """Whether a broker would make a configuration for a group of this name."""
    return len(name) <= GROUP_CHARS_MAX and _LEGAL.fullmatch(name) is not None

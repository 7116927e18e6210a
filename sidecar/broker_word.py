"""The broker's own word about its log, asked over the wire when somebody says where.

Owns the connection and the log line when the broker stops or starts answering. Does not decide the bound.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

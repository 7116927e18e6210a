"""`tiered` on a machine whose clock is an hour fast: every request is signed with that time.

usage: python -m tests.integration.skewed_clock VERB …
"""

import sys
from datetime import UTC, datetime, timedelta

import botocore.auth

from rocketmq_tiered.cli import main

AHEAD = timedelta(hours=1)

if __name__ == "__main__":
    botocore.auth.get_current_datetime = lambda: datetime.now(UTC).replace(tzinfo=None) + AHEAD
    sys.exit(main())

"""`python -m rocketmq_tiered.cli` is `tiered`."""

import sys

from rocketmq_tiered.cli import main

sys.exit(main())

"""`python -m sidecar.cli` is `tiered`."""

import sys

from sidecar.cli import main

sys.exit(main())

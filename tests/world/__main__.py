"""One history: ``python -m tests.world --seed N [--steps M] [--trace]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.world.world import World
from tiered.console import print_lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--trace", action="store_true", help="print every request and step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="world-") as directory:
        world = World(options.seed, Path(directory), print_lines if options.trace else lambda line: None)
        world.run(options.steps)
        print_lines(*(f"{count:7} {what}" for what, count in sorted(world.counts.items())), world.digest())
    return 0


sys.exit(main())

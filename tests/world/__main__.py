"""Histories: ``python -m tests.world --seed N [--count N] [--steps M] [--trace] [--shrink] [--defect NAME]``."""

import argparse
import logging
import sys
from contextlib import nullcontext

from tests.world.defects import DEFECTS
from tests.world.histories import STEPS, histories, noticed_after, played, shrunk
from tiered.console import print_lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the first one")
    parser.add_argument("--count", type=int, default=1, help="so many seeds, on all processors")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--without", default="", help="without these actors and faults, with commas")
    parser.add_argument("--trace", action="store_true", help="print every request and step")
    parser.add_argument("--shrink", action="store_true", help="drop actors, faults and steps while it fails")
    parser.add_argument(
        "--defect", default="", help="with this one planted; all: each of them in turn, for a table"
    )
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.defect == "all":
        for name, defect in DEFECTS.items():
            with defect.planted():
                after = [noticed_after(options.seed + 1000 * part, options.count) for part in range(3)]
            print_lines(f"{sorted(after)[1]:4} {name} {after}")
        return 0
    with DEFECTS[options.defect].planted() if options.defect else nullcontext():
        return _played(options)


def _played(options: argparse.Namespace) -> int:
    without = frozenset(filter(None, options.without.split(",")))
    if options.shrink:
        steps, without = shrunk(options.seed, options.steps)
        print_lines(f"--seed {options.seed} --steps {steps} --without '{','.join(sorted(without))}'")
        return 0
    if options.trace:
        played(options.seed, options.steps, without, print_lines)
        return 0
    counts = histories(range(options.seed, options.seed + options.count), options.steps, without)
    print_lines(*(f"{count:7} {what}" for what, count in sorted(counts.items())))
    failures = [what for what in counts if what.startswith("seed ")]
    print_lines(*failures, f"{len(failures)} of {options.count} histories break a rule")
    return int(bool(failures))


sys.exit(main())

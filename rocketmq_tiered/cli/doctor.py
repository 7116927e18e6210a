"""`tiered doctor`: check this host, the broker's store, the broker and the object store; say how to correct each."""

import argparse
import os

from rocketmq_tiered.cli.arguments import (
    BROKER_FLAGS,
    NAME_FLAGS,
    STORE_FLAGS,
    add_json,
    add_setting_flags,
    add_state_dir,
    add_store,
    settings_of,
)
from rocketmq_tiered.doctor.check import Check, CheckFinding, Outcome, exit_code
from rocketmq_tiered.doctor.examination import Examination
from tiered.console import print_json, print_lines, print_marked

_IS_GOOD = {Outcome.OK: True, Outcome.FAILED: False, Outcome.NOT_CHECKED: None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive and the options that `tiered run` would be started with."""
    parser.add_argument(
        "archive.url", metavar="ARCHIVE_URL", nargs="?", help="file:///directory or s3://bucket/prefix"
    )
    add_store(parser)
    add_state_dir(parser)
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS, BROKER_FLAGS)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Run all checks, and print each result when it is known. The exit code says whether one failed."""
    results = []
    with Examination(settings_of(options), options.config, os.environ) as examination:
        for check, finding in examination.results():
            results.append((check, finding))
            if not options.json:
                fix = f"; {finding.fix}" if finding.fix else ""
                print_marked(_IS_GOOD[finding.outcome], f"{check.title}: {finding.detail}{fix}")
    findings = [finding for _, finding in results]
    code = exit_code(findings)
    if options.json:
        print_json({"exitCode": code, "checks": [_document(*result) for result in results]})
    else:
        counts = dict.fromkeys(Outcome, 0)
        for finding in findings:
            counts[finding.outcome] += 1
        print_lines(", ".join(f"{count} {outcome.value}" for outcome, count in counts.items()))
    return code


def _document(check: Check, finding: CheckFinding) -> dict[str, str]:
    """One check in the JSON of ``--json``."""
    return {
        "id": check.id,
        "title": check.title,
        "outcome": finding.outcome.value,
        "detail": finding.detail,
        "fix": finding.fix,
    }

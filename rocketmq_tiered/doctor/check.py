"""A check, its finding, and how a list of checks is run. Checks depend on others by id."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tiered.errors import TieredError, UnavailableError
from tiered.object_store.create_race import TRIAL_PREFIX, TRIAL_SUFFIX


class Outcome(Enum):
    """What a check found."""

    OK = "ok"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class CheckFinding:
    """The outcome in one line. ``fix``: what to do about a failure. ``is_temporary``: it may pass without a change."""

    outcome: Outcome
    detail: str
    fix: str = ""
    is_temporary: bool = False


@dataclass(frozen=True)
class Check:
    """One check. ``id`` is stable, for programs. It runs only if none of ``needs`` failed or was skipped."""

    id: str
    title: str
    run: Callable[[], CheckFinding]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyLines:
    """Statements that the policy of `tiered run` may lack; deploy/s3 has it whole, with conditions. ``prefix``: of all
    keys, with a slash at its end, or empty."""

    bucket: str
    prefix: str = ""

    def line(self, action: str) -> str:
        """The statement of a policy that allows ``action``, such as ``s3:PutObject``, on the archive's keys, as JSON on
        one line."""
        statement: dict[str, object] = {"Effect": "Allow", "Action": action}
        if action == "s3:ListBucket":
            statement["Resource"] = f"arn:aws:s3:::{self.bucket}"
            if self.prefix:
                statement["Condition"] = {"StringLike": {"s3:prefix": [f"{self.prefix}*"]}}
        else:
            # The writer deletes only the objects of its checks; tiered gc has an account of its own.
            rest = f"*{TRIAL_PREFIX}*{TRIAL_SUFFIX}" if action == "s3:DeleteObject" else "*"
            statement["Resource"] = f"arn:aws:s3:::{self.bucket}/{self.prefix}{rest}"
        return json.dumps(statement)


_DENIED = re.compile(r"(s3:\w+)(?: or s3:\w+)?: AccessDenied")


def denied_action(error: TieredError) -> str:
    """The action that a bucket's policy lacks, such as ``s3:PutObject``; empty for other errors. Pure."""
    found = _DENIED.search(error.message)
    return found[1] if found else ""


def ok(detail: str) -> CheckFinding:
    """A finding without a problem."""
    return CheckFinding(Outcome.OK, detail)


def failed(detail: str, fix: str) -> CheckFinding:
    """A problem and its fix."""
    return CheckFinding(Outcome.FAILED, detail, fix)


def not_checked(why: str) -> CheckFinding:
    """A check that does not apply or cannot be made."""
    return CheckFinding(Outcome.NOT_CHECKED, why)


def failed_by(error: TieredError, policy: PolicyLines | None = None) -> CheckFinding:
    """The finding that a check failed with ``error``. If a permission is missing, the fix is the statement to add to
    the account's policy."""
    action = denied_action(error)
    is_temporary = isinstance(error, UnavailableError)
    fix = error.hint or ("try again" if is_temporary else "")
    if action and policy is not None:
        fix = f"add to the policy of this account, as in deploy/s3/policy-writer.json: {policy.line(action)}"
    return CheckFinding(Outcome.FAILED, error.message, fix, is_temporary)


def run_checks(
    checks: Sequence[Check], policy: PolicyLines | None = None
) -> Iterator[tuple[Check, CheckFinding]]:
    """Run ``checks`` in order, and yield each with its finding. An error of a check is its finding; a check that needs
    one which failed or was not checked is not made."""
    titles = {check.id: check.title for check in checks}
    missing: dict[str, Outcome] = {}  # of the checks that others cannot rely on
    for check in checks:
        lacking = next((needed for needed in check.needs if needed in missing), None)
        if lacking is not None:
            why = "failed" if missing[lacking] is Outcome.FAILED else "was not checked"
            finding = not_checked(f"{titles.get(lacking, lacking)} {why}")
        else:
            try:
                finding = check.run()
            except TieredError as error:
                finding = failed_by(error, policy)
            except OSError as error:
                finding = failed(
                    f"{error.filename or check.title}: {error.strerror or error}", "see the system's log"
                )
        if finding.outcome is not Outcome.OK:
            missing[check.id] = finding.outcome
        yield check, finding


def exit_code(findings: Sequence[CheckFinding]) -> int:
    """0 without failures, 4 if all failures are temporary, else 1."""
    failures = [finding for finding in findings if finding.outcome is Outcome.FAILED]
    if not failures:
        return 0
    return UnavailableError.exit_code if all(failure.is_temporary for failure in failures) else 1

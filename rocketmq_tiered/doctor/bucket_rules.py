"""Reports what a bucket does with objects: versioning, Object Lock, lifecycle rules. What stays, and until when."""

from collections.abc import Callable, Sequence

from rocketmq_tiered.doctor.check import Check, CheckFinding, Outcome, denied_action, failed, not_checked, ok
from tiered.errors import RefusedRequestError, TieredError
from tiered.object_store.bucket_probe import BucketProbe, LifecycleRule, LockRule, open_probe
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import parse_url

DISABLED = "disabled"
ABORT_RULE = "add the lifecycle rule of deploy/s3/lifecycle.json"


def rule_checks(probe: BucketProbe, prefix: str) -> list[Check]:
    """The checks of the bucket's own rules: versioning, Object Lock, lifecycle. ``prefix``: that of the archive's keys
    in the bucket, with a slash at its end."""
    return [
        Check(
            "bucket-versioning",
            "versions of objects",
            lambda: _if_allowed(lambda: _versioning(probe, prefix)),
            ("bucket",),
        ),
        Check(
            "bucket-object-lock",
            "Object Lock",
            lambda: _if_allowed(lambda: judge_lock(probe.object_lock())),
            ("bucket",),
        ),
        Check(
            "bucket-lifecycle",
            "lifecycle rules",
            lambda: _if_allowed(lambda: judge_lifecycle(probe.lifecycle(), prefix, is_aws=probe.is_aws)),
            ("bucket",),
        ),
    ]


def what_stays(url: str, options: StoreOptions) -> list[str]:
    """One line for each rule of the bucket at ``url`` by which it keeps deleted objects, and for each that cannot be
    read. Empty for a URL that is not s3://."""
    probe = open_probe(url, options)
    if probe is None:
        return []
    prefix = parse_url(url).prefix
    prefix = f"{prefix}/" if prefix else ""
    lines = []
    try:
        for title, check in (
            ("versions of objects", lambda: _versioning(probe, prefix)),
            ("Object Lock", lambda: judge_lock(probe.object_lock())),
        ):
            try:
                finding = _if_allowed(check)
            except TieredError as error:
                finding = not_checked(error.message)
            if finding.outcome != Outcome.OK or not finding.detail.startswith(DISABLED):
                lines.append(f"{title}: {finding.detail}")
    finally:
        probe.close()
    return lines


def _if_allowed(read: Callable[[], CheckFinding]) -> CheckFinding:
    """The finding of ``read``, which asks for a rule of the bucket; not checked if the account may not read it, as an
    archive does not need that permission, or the store does not know the request."""
    try:
        return read()
    except TieredError as error:
        action = denied_action(error)
        if action:
            return not_checked(f"this account is not allowed {action}, which archiving does not need")
        if isinstance(error, RefusedRequestError):
            return not_checked("the object store does not support the request for this rule")
        raise


def _versioning(probe: BucketProbe, prefix: str) -> CheckFinding:
    """What the bucket's versioning keeps of deleted objects, as far as this account may read it."""
    status = probe.versioning()
    try:
        return judge_versioning(status, probe.lifecycle() if status else [], prefix)
    except TieredError as error:
        if not (action := denied_action(error)):
            raise
        kept = f"{status.lower()}: deleted objects stay as noncurrent versions until a rule removes them"
        return not_checked(f"{kept}; these rules are unknown, because this account is not allowed {action}")


def judge_versioning(status: str, rules: Sequence[LifecycleRule], prefix: str) -> CheckFinding:
    """What becomes of deleted objects below ``prefix``, by the ``status`` of versioning ("": off) and the lifecycle
    ``rules`` of the bucket. Pure."""
    if not status:
        return ok(f"{DISABLED}: deleted objects are gone at once")
    kept = [rule for rule in rules if rule.noncurrent_expires and prefix.startswith(rule.prefix)]
    if kept:
        times = ", ".join(f"{rule.noncurrent_expires} (rule {rule.name})" for rule in kept)
        return ok(f"{status.lower()}: deleted objects stay as noncurrent versions for {times}")
    return failed(
        f"{status.lower()}: deleted objects stay as noncurrent versions forever, and are paid for",
        "add a lifecycle rule with NoncurrentVersionExpiration to the bucket",
    )


def judge_lock(rule: LockRule | None) -> CheckFinding:
    """How long objects cannot be deleted, by the default retention ``rule`` of Object Lock; None: no Object Lock.
    Pure."""
    if rule is None:
        return ok(f"{DISABLED}: objects can be deleted at any time")
    if not rule.mode:
        return ok("enabled without a default retention: objects are not locked")
    return ok(f"every object version is locked for {rule.period} ({rule.mode}), also deleted ones")


def judge_lifecycle(rules: Sequence[LifecycleRule], prefix: str, *, is_aws: bool) -> CheckFinding:
    """Whether lifecycle rules of the bucket harm the archive below ``prefix``, and whether one removes parts of
    unfinished uploads, which cost money. Pure."""
    matching = [rule for rule in rules if rule.prefix.startswith(prefix) or prefix.startswith(rule.prefix)]
    harmful = [rule for rule in matching if rule.expires]
    if harmful:
        what = ", ".join(f"rule {rule.name} deletes objects after {rule.expires}" for rule in harmful)
        return failed(what, f"remove this rule for {prefix or 'this bucket'}: it destroys the archive")
    # Objects in these classes cannot be read without a restore that takes hours; GLACIER_IR can.
    frozen = [
        rule for rule in matching if "GLACIER" in rule.moves.replace("GLACIER_IR", "") or "DEEP" in rule.moves
    ]
    if frozen:
        what = ", ".join(f"rule {rule.name} moves objects: {rule.moves}" for rule in frozen)
        return failed(what, "use a storage class that can be read at once, such as STANDARD_IA or GLACIER_IR")
    aborts = [
        rule.aborts_uploads for rule in matching if rule.aborts_uploads and prefix.startswith(rule.prefix)
    ]
    if not aborts and is_aws:
        return failed("parts of unfinished uploads stay forever, and are paid for", ABORT_RULE)
    if not aborts:
        return ok("no lifecycle rule; parts of unfinished uploads stay unless the server removes them")
    moved = "".join(f"; rule {rule.name} moves objects: {rule.moves}" for rule in matching if rule.moves)
    return ok(f"parts of unfinished uploads are removed after {aborts[0]}{moved}")

"""The policies of deploy/s3 for a given bucket and prefix, as they are for AWS or as MinIO takes them."""

import json
from pathlib import Path
from typing import Any

S3 = Path(__file__).parents[2] / "deploy" / "s3"
ROLES = ("reader", "writer", "server", "collector")
AWS_ONLY = ("s3:if-none-match", "s3:ObjectCreationOperation")
"""Conditions that MinIO does not know."""

Policy = dict[str, Any]


def policy_of(role: str, bucket: str = "BUCKET", prefix: str = "PREFIX") -> Policy:
    """The policy of a role with the names filled in."""
    text = (S3 / f"policy-{role}.json").read_text("utf-8")
    document: Policy = json.loads(text.replace("BUCKET", bucket).replace("PREFIX", prefix))
    return document


def for_minio(policy: Policy, *, has_tls: bool) -> Policy:
    """``policy`` without what MinIO refuses: AWS's own conditions, statements for keys of AWS KMS, and, for a server
    without TLS, the denial of plain HTTP."""
    statements: list[Policy] = []
    for statement in policy["Statement"]:
        if all(action.startswith("kms:") for action in statement["Action"]):
            continue
        if statement["Effect"] == "Deny" and not has_tls:
            continue
        keys = {key for test in statement.get("Condition", {}).values() for key in test}
        dropped: set[str] = {"Condition"} if keys & set(AWS_ONLY) else set()
        kept = {name: value for name, value in statement.items() if name not in dropped}
        if not any(_grants(other, kept) for other in statements):
            statements.append(kept)
    return {**policy, "Statement": statements}


def _grants(one: Policy, other: Policy) -> bool:
    """Whether ``one`` says what ``other`` says."""
    return all(one.get(name) == other.get(name) for name in ("Effect", "Action", "Resource", "Condition"))


def allowed_actions(policy: Policy) -> list[str]:
    """Every action that ``policy`` allows, in order."""
    return [
        action
        for statement in policy["Statement"]
        if statement["Effect"] == "Allow"
        for action in statement["Action"]
    ]


def without(policy: Policy, action: str) -> Policy:
    """``policy`` with ``action`` taken away."""
    statements = [
        {**statement, "Action": [name for name in statement["Action"] if name != action]}
        for statement in policy["Statement"]
    ]
    return {**policy, "Statement": [statement for statement in statements if statement["Action"]]}

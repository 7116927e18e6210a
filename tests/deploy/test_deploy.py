"""Checks the files in deploy/, the compose file and the Dockerfile without running them."""

import argparse
import configparser
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rocketmq_tiered.cli import gc
from rocketmq_tiered.process.findings import ABOUT, RunState
from tests.deploy.bucket_policies import ROLES, for_minio, policy_of
from tests.servers.install import NotInstallableError, compose_validator, promtool_binary
from tiered.catalog.holdings import OBJECT_PREFIXES
from tiered.errors import AccessDeniedError, NotFoundError, RefusedRequestError, UnavailableError
from tiered.formats.keys import (
    SERVE_PREFIX,
    catalog_key,
    data_key,
    index_key,
    page_key,
    set_key,
    state_key,
    timer_key,
)
from tiered.model.queue import QueueKey
from tiered.object_store.create_race import TRIAL_PREFIX, TRIAL_SUFFIX
from tiered.settings.load import load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"rocketmq_tiered_store_([a-z_]+)")
DERIVED = re.compile(r"_(total|bucket|count|sum)$")


def compose() -> dict[str, Any]:
    """The compose file as YAML merges it."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    return document


@pytest.mark.integration
def test_compose_file_is_valid() -> None:
    try:
        validator = compose_validator()
    except NotInstallableError as error:
        pytest.skip(f"compose-go is not available: {error}")
    command = [str(validator), str(ROOT / "docker-compose.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert {"namesrv", "broker", "minio", "sidecar"} <= services.keys()


def test_compose_settings_exist() -> None:
    environment = compose()["services"]["sidecar"]["environment"]
    ours = {name: value for name, value in environment.items() if name.startswith("TIERED_")}
    settings = load_settings(None, environment=ours, flags={}).settings
    assert settings.archive.url == "s3://rocketmq-tiered/demo"
    assert settings.object_store.trusted_network


def test_compose_mounts_exist_and_ports_stay_local() -> None:
    for service in compose()["services"].values():
        for mount in service.get("volumes", ()):
            source = mount.split(":", 1)[0]
            assert not source.startswith(".") or (ROOT / source).exists(), mount
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{port} would be reachable from outside"


OWN = ("sidecar", "gc")
SEES = {"minio": ["minio_user", "minio_password"], "sidecar": ["sidecar"], "gc": ["gc"]}


def test_compose_services_are_confined() -> None:
    services = compose()["services"]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("cap_add", []) == (["CHOWN"] if name == "store-owner" else []), name
        assert not service.get("privileged") and "docker.sock" not in str(service.get("volumes", ""))
    for name in OWN:
        assert services[name]["read_only"] is True
        assert services[name]["user"] == "3000:3000"
        written = [mount.split(":")[1] for mount in services[name]["volumes"] if not mount.endswith(":ro")]
        assert "/var/lib/rocketmq-tiered" in written


def test_compose_services_see_only_their_own_secrets() -> None:
    document = compose()
    services, secrets = document["services"], document["secrets"]
    accounts = {name: (ROOT / secret["file"]).read_text("utf-8") for name, secret in secrets.items()}
    words = {word for text in accounts.values() for word in re.findall(r"\S*demo-\S+", text)}
    assert len(words) == 6
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    assert not any(word in text for word in words), "a secret is a file, not an environment"
    for name, service in services.items():
        if name != "bucket":  # it creates the accounts
            assert service.get("secrets", []) == SEES.get(name, []), name
        keys = [key for key in service.get("environment", {}) if re.search("SECRET|PASSWORD|KEY", key)]
        assert all(key.endswith("_FILE") for key in keys), name
    used = {name: services[name]["environment"]["AWS_SHARED_CREDENTIALS_FILE"] for name in OWN}
    assert used == {name: f"/run/secrets/{name}" for name in OWN}


@pytest.mark.parametrize(("account", "role"), [("sidecar", "writer"), ("gc", "collector")])
def test_compose_accounts_have_the_policies_of_their_roles(account: str, role: str) -> None:
    policy = json.loads((DEPLOY / "compose" / "policies" / f"{account}.json").read_text("utf-8"))
    assert policy == for_minio(policy_of(role, "rocketmq-tiered", "demo"), has_tls=False)


def test_image_copies_exist() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    for source in (name for names in copied for name in names):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, f"{source} is hidden from the build"


@pytest.mark.parametrize("name", ["grafana/rocketmq-tiered.json", "prometheus/alerts.yml"])
def test_metrics_named_here_exist(name: str) -> None:
    source = (ROOT / "rocketmq_tiered" / "process" / "metrics.py").read_text("utf-8")
    serving = (ROOT / "rocketmq_tiered" / "process" / "serving_metrics.py").read_text("utf-8")
    for module, prefix in (("archive_admin", "serve"), ("mount_report", "mount")):
        text = (ROOT / "rocketmq_tiered" / "process" / f"{module}.py").read_text("utf-8")
        source += re.sub(r'"(\w+)": \(', rf'"{prefix}_\1": (', text)
    source += re.sub(r'f"{mode}_(\w+)"', r'"proxy_\1" "slave_\1"', serving)
    used = {DERIVED.sub("", metric) for metric in METRIC.findall((DEPLOY / name).read_text("utf-8"))}
    unknown = sorted(
        metric for metric in used if f'"{metric}"' not in source and f'}}_{metric}"' not in source
    )
    assert len(used) > 5
    assert not unknown


def test_alerts_behave() -> None:
    try:
        promtool = promtool_binary()
    except NotInstallableError as error:
        pytest.skip(f"promtool is not available: {error}")
    rules = DEPLOY / "prometheus"
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([promtool, *command], cwd=rules, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    rules, tests = (
        (DEPLOY / "prometheus" / name).read_text("utf-8") for name in ("alerts.yml", "alerts_test.yml")
    )
    assert set(re.findall(r'alertname="(\w+)"', tests)) == set(re.findall(r"alert: (\w+)", rules))


def test_every_alert_and_state_is_explained() -> None:
    page = (ROOT / "docs" / "OPERATING.md").read_text("utf-8")
    alerts = re.findall(r"alert: (\w+)", (DEPLOY / "prometheus" / "alerts.yml").read_text("utf-8"))
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text("utf-8"))["groups"]
    linked = {rule["alert"]: rule["annotations"]["runbook"] for rule in group["rules"]}
    assert linked == {alert: f"docs/OPERATING.md#{alert.lower()}" for alert in alerts}
    assert re.findall(r"^### (\w+)", page, re.MULTILINE) == alerts
    states = set(re.findall(r"^\| `([\w ]+)", page.partition("## Alerts")[0], re.MULTILINE))
    assert states == {state.value for state in RunState}
    findings = page.partition("### TieredNeedsAttention")[2].partition("###")[0]
    assert set(ABOUT) <= set(re.findall(r"`([a-z-]+)`", findings))


UNITS = sorted((DEPLOY / "systemd").iterdir())


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_file_is_valid(path: Path, tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    for source in UNITS:  # a timer requires its service
        text = source.read_text("utf-8")
        (tmp_path / source.name).write_text(text.replace("/opt/rocketmq-tiered/bin/tiered", "/bin/true"))
    environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    done = subprocess.run(
        [verify, "verify", "--man=no", str(tmp_path / path.name)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # Older systemd versions warn about newer options.
    known_later = ("RestartSteps", "RestartMaxDelaySec")
    complaints = [
        line
        for line in done.stderr.splitlines()
        if path.name in line and not ("Unknown key" in line and any(key in line for key in known_later))
    ]
    assert not complaints


SERVICES = [path for path in UNITS if path.suffix == ".service"]
HARDENED = {
    "UMask": "0077",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectProc": "invisible",
    "ProtectClock": "yes",
    "ProtectHostname": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectControlGroups": "yes",
    "PrivateDevices": "yes",
    "PrivateTmp": "yes",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "RemoveIPC": "yes",
    "KeyringMode": "private",
    "SystemCallArchitectures": "native",
    "SystemCallErrorNumber": "EPERM",
}


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_services_are_confined(path: Path) -> None:
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert [line for line in lines if line.startswith("User=")] == ["User=rocketmq"]
    for name, value in HARDENED.items():
        assert f"{name}={value}" in lines, name
    allowed_calls, *changes = [line for line in lines if line.startswith("SystemCallFilter=")]
    assert allowed_calls.startswith("SystemCallFilter=@system-service")
    assert changes[0] == "SystemCallFilter=~@privileged @resources"
    # This service lowers the priority of the process that joins objects.
    has_child = path.name == "rocketmq-tiered.service"
    assert changes[1:] == ["SystemCallFilter=setpriority sched_setscheduler"] * has_child


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_services_are_little_exposed(path: Path) -> None:
    """By systemd's own measure, from 0 (confined) to 10."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    command = [analyze, "security", "--offline=true", "--no-pager", "--threshold=20", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_unit_restarts_after_object_store_refusals() -> None:
    """A clock or credentials may be missing at boot; archiving must start once they are set."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "systemd" / "rocketmq-tiered.service").read_text("utf-8"))
    final = unit["Service"]["RestartPreventExitStatus"].split()
    assert unit["Service"]["Restart"] == "on-failure"
    for error in (AccessDeniedError, RefusedRequestError, NotFoundError, UnavailableError):
        assert str(error.exit_code) not in final


def gc_command(line: str, environment: dict[str, str]) -> argparse.Namespace:
    """The options of the first `tiered gc` in a line."""
    found = re.search(r"/?tiered gc ([^;&|\n]+)", line)
    assert found is not None, line
    words = [
        re.sub(r"\$\{?(\w+)\}?", lambda name: environment[name[1]], word) for word in shlex.split(found[1])
    ]
    parser = argparse.ArgumentParser(exit_on_error=False)
    gc.add_arguments(parser)
    return parser.parse_args(words)


def test_garbage_is_collected_every_night() -> None:
    """No other process deletes: the sidecar's account cannot, and pending deletions would only grow."""
    service, timer = (
        (DEPLOY / "systemd" / f"rocketmq-tiered-gc.{kind}").read_text("utf-8")
        for kind in ("service", "timer")
    )
    (start,) = [line for line in service.splitlines() if line.startswith("ExecStart=")]
    assert gc_command(start, {"ARCHIVE_URL": "s3://bucket/prefix"}).apply
    assert "Type=oneshot" in service and "[Install]" not in service  # the timer starts it
    assert "OnCalendar=" in timer and "Persistent=true" in timer and "WantedBy=timers.target" in timer
    sandbox, sidecar = (compose()["services"][name] for name in ("gc", "sidecar"))
    command = gc_command(sandbox["command"][0].replace("$$", "$"), sandbox["environment"])
    assert (command.url, command.apply) == (sidecar["environment"]["TIERED_ARCHIVE__URL"], True)
    ours = {name: value for name, value in sandbox["environment"].items() if name.startswith("TIERED_")}
    assert load_settings(None, environment=ours, flags={}).settings.object_store.trusted_network


def test_policies_never_let_anyone_overwrite_and_only_some_delete() -> None:
    for role in ROLES:
        for statement in policy_of(role)["Statement"]:
            if statement["Effect"] == "Allow":
                deletes = any("Delete" in action for action in statement["Action"])
                of_checks = statement["Resource"] == [
                    f"arn:aws:s3:::BUCKET/PREFIX/*{TRIAL_PREFIX}*{TRIAL_SUFFIX}"
                ]
                assert not deletes or role in ("server", "collector") or of_checks
                assert not deletes or not any("catalog" in resource for resource in statement["Resource"])
                assert "s3:PutObject" not in statement["Action"] or "Condition" in statement


@pytest.mark.parametrize("role", ROLES)
def test_policies_are_bound_to_prefix_tls_and_key(role: str) -> None:
    (listing,) = [one for one in policy_of(role)["Statement"] if "s3:ListBucket" in one["Action"]]
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["PREFIX/*"]}}
    *of_the_key, denial = [one for one in policy_of(role)["Statement"] if one["Effect"] == "Deny"]
    private = ["arn:aws:s3:::BUCKET/PREFIX/*/*/private/key"]
    assert [one["Resource"] for one in of_the_key] == ([] if role == "writer" else [private])
    assert denial["Action"] == ["s3:*"]
    assert denial["Resource"] == ["arn:aws:s3:::BUCKET", "arn:aws:s3:::BUCKET/*"]
    assert denial["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    (key,) = [one for one in policy_of(role)["Statement"] if "kms:Decrypt" in one["Action"]]
    assert ("kms:GenerateDataKey" in key["Action"]) is (role != "reader")
    assert key["Condition"] == {"StringEquals": {"kms:ViaService": "s3.REGION.amazonaws.com"}}
    assert len(json.dumps(policy_of(role))) < 2048, "IAM's limit for the inline policies of a user"


def allowed(role: str, action: str, key: str) -> bool:
    """Whether a role's policy allows ``action`` on ``key`` below BUCKET/PREFIX; conditions are ignored."""
    return any(
        action in statement["Action"] and fnmatch.fnmatchcase(f"arn:aws:s3:::BUCKET/PREFIX/{key}", resource)
        for statement in policy_of(role)["Statement"]
        if statement["Effect"] == "Allow"
        for resource in statement["Resource"]
    )


def test_the_writer_may_delete_only_the_objects_of_its_checks() -> None:
    """Also for a topic named like their folder."""
    topic = data_key(QueueKey("doctor", 0, 0), 0, epoch=3, attempt=1)
    for archive in ("cluster/broker", "doctor/doctor"):
        assert allowed("writer", "s3:DeleteObject", f"{archive}/{TRIAL_PREFIX}0/small{TRIAL_SUFFIX}")
        for key in (topic, catalog_key(9), state_key("topics", 3, 1, "digest"), f"{SERVE_PREFIX}{9:020}"):
            assert not allowed("writer", "s3:DeleteObject", f"{archive}/{key}")
    assert allowed("writer", "s3:DeleteObject", f"{TRIAL_PREFIX}0/small{TRIAL_SUFFIX}")


def test_collector_may_delete_garbage_only() -> None:
    """Also for a broker named like a folder of an archive."""
    garbage = [
        data_key(QueueKey("orders", 0, 0), 0, epoch=3, attempt=1),
        set_key("0001_2", epoch=3, attempt=1),
        page_key("root", 9, 3, "id"),
        index_key(0, 1, 3, "id"),
        state_key("topics", 3, 1, "digest"),
        timer_key(3, 1),
    ]
    assert {f"{key.split('/')[0]}/" for key in garbage} == set(OBJECT_PREFIXES)
    kept = [catalog_key(9), f"{SERVE_PREFIX}{9:020}", f"{SERVE_PREFIX}retry/{9:020}"]
    for archive in ("cluster/broker", "data/index", "state/state", "a-b-c-d/pages"):
        for key in garbage:
            assert allowed("collector", "s3:DeleteObject", f"{archive}/{key}")
            assert not allowed("server", "s3:DeleteObject", f"{archive}/{key}")
        for key in kept:
            is_served = key.startswith(SERVE_PREFIX)
            assert not allowed("collector", "s3:DeleteObject", f"{archive}/{key}")
            assert allowed("server", "s3:DeleteObject", f"{archive}/{key}") is is_served
            assert allowed("server", "s3:PutObject", f"{archive}/{key}") is is_served

"""The Helm chart: linted and rendered by helm, its objects checked against Kubernetes' OpenAPI documents."""

import functools
import json
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rocketmq_tiered.cli import VERBS
from tests.servers.install import NotInstallableError, helm_binary, kubernetes_api
from tiered.settings.load import load_settings

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "rocketmq-tiered"
REQUIRED = {"archive": {"url": "s3://logs/rmq"}, "broker": {"nameServers": "namesrv:9876"}}
FULL = {
    "archive": {
        "url": "s3://logs/rmq",
        "region": "eu-central-1",
        "endpointUrl": "http://minio:9000",
        "trustedNetwork": True,
    },
    "accounts": {
        "sidecar": {"secret": "tiered-sidecar"},
        "collector": {"secret": "tiered-gc"},
        "serve": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/serve"}},
    },
    "broker": {
        "nameServers": "namesrv:9876",
        "config": "fileReservedTime = 48",
        "storage": {"className": "fast"},
    },
    "sidecar": {"environment": {"TIERED_OFFLOAD__BATCH_AGE_MS": "10s"}},
    "serve": {"enabled": True, "advertise": "archive.example:9876"},
    "settings": '[retention]\nttl = "30d"\n[[topics.rules]]\npattern = "audit"\nttl = "forever"\n',
    "imagePullSecrets": [{"name": "registry"}],
}
SERVE_ALONE = {"archive": {"url": "s3://logs/rmq"}, "broker": {"enabled": False}, "serve": {"enabled": True}}
KUBERNETES = ("--kube-version", "1.31.0")
DOCUMENTS = {"v1": "api__v1", "apps/v1": "apis__apps__v1", "batch/v1": "apis__batch__v1"}


def helm(
    *arguments: object, values: dict[str, Any], directory: Path, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """Run a command of helm on the chart."""
    try:
        program = helm_binary()
    except NotInstallableError as error:
        pytest.skip(f"helm is not available: {error}")
    given = directory / "values.json"
    given.write_text(json.dumps(values))
    command = [program, *arguments, chart, "--values", given, *KUBERNETES]
    environment = {"HOME": str(directory), "PATH": ""}
    return subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
    )


def rendered(
    values: dict[str, Any], directory: Path, chart: Path = CHART
) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects by kind and name."""
    done = helm("template", "t", "--namespace", "mq", values=values, directory=directory, chart=chart)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@functools.cache
def validator(version: str, kind: str) -> jsonschema.Draft4Validator:
    """Of one kind, from Kubernetes' own OpenAPI document; unknown fields are errors."""
    try:
        text = (kubernetes_api() / f"{DOCUMENTS[version]}_openapi.json").read_text("utf-8")
    except NotInstallableError as error:
        pytest.skip(f"Kubernetes' API is not available: {error}")
    document = json.loads(text.replace('"nullable"', '"x-nullable"'))
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
        if schema.get("format") == "int-or-string" or "oneOf" in schema:
            schema.clear()  # int-or-string and quantities
    group, _, short = version.rpartition("/")
    (name,) = [
        name
        for name, schema in schemas.items()
        if {"group": group, "kind": kind, "version": short}
        in schema.get("x-kubernetes-group-version-kind", ())
    ]
    return jsonschema.Draft4Validator({"$ref": f"#/components/schemas/{name}", **document})


@pytest.mark.parametrize("values", [REQUIRED, FULL, SERVE_ALONE], ids=["required", "full", "serve alone"])
def test_chart_is_linted_and_its_objects_are_kubernetes_ones(values: dict[str, Any], tmp_path: Path) -> None:
    lint = helm("lint", "--strict", values=values, directory=tmp_path)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    objects = rendered(values, tmp_path)
    assert len(objects) >= 4
    check_against_kubernetes(objects)


def check_against_kubernetes(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    for (kind, name), one in objects.items():
        errors = [
            f"{kind}/{name} {error.json_path}: {error.message[:200]}"
            for error in validator(one["apiVersion"], kind).iter_errors(one)
        ]
        assert not errors


def pods(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod specifications by component."""
    found = {}
    for one in objects.values():
        template = one.get("spec", {}).get("template") or one.get("spec", {}).get("jobTemplate", {}).get(
            "spec", {}
        ).get("template")
        if template:
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template["spec"]
    return found


def test_pods_have_the_least_privileges(tmp_path: Path) -> None:
    found = pods(rendered(FULL, tmp_path))
    assert found.keys() == {"broker", "serve", "collector"}
    for pod in found.values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 3000
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["name"] == "broker" or security["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]
            assert not any("KEY" in one["name"] and "value" in one for one in container["env"])
    secrets = {
        role: {one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"] if "KEY" in one["name"]}
        for role, pod in found.items()
        for container in pod["containers"]
        if container["name"] == "tiered"
    }
    assert secrets == {"broker": {"tiered-sidecar"}, "serve": set(), "collector": {"tiered-gc"}}


def test_probes_ask_the_admin_port(tmp_path: Path) -> None:
    found = pods(rendered(FULL, tmp_path))
    (sidecar,) = [one for one in found["broker"]["containers"] if one["name"] == "tiered"]
    (server,) = found["serve"]["containers"]
    for container in (sidecar, server):
        assert {"name": "admin", "containerPort": 10919} in container["ports"]
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": "admin"}
    assert "readinessProbe" not in sidecar, "clients reach the broker also while nothing is archived"
    assert server["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "admin"}


def test_sidecar_shares_the_brokers_store_at_its_path(tmp_path: Path) -> None:
    objects = rendered(FULL, tmp_path)
    containers = pods(objects)["broker"]["containers"]
    mounts = [
        next(mount for mount in one["volumeMounts"] if mount["name"] == "store")["mountPath"]
        for one in containers
    ]
    conf = objects[("ConfigMap", "t-rocketmq-tiered-broker")]["data"]["broker.conf"]
    assert len(mounts) == 2 and len(set(mounts)) == 1 and f"storePathRootDir = {mounts[0]}\n" in conf
    assert "fileReservedTime = 48" in conf.splitlines()


def test_environment_settings_and_arguments_are_known(tmp_path: Path) -> None:
    objects = rendered(FULL, tmp_path)
    file = tmp_path / "tiered.toml"
    file.write_text(objects[("ConfigMap", "t-rocketmq-tiered-settings")]["data"]["tiered.toml"])
    for pod in pods(objects).values():
        for container in pod["containers"]:
            if container["name"] == "tiered":
                assert container["args"][0] in VERBS
                ours = {
                    one["name"]: one["value"] for one in container["env"] if one["name"].startswith("TIERED_")
                }
                assert ours.pop("TIERED_CONFIG") == "/etc/rocketmq-tiered/tiered.toml"
                settings = load_settings(file, environment=ours, flags={}).settings
                assert (settings.archive.url, settings.admin.host) == ("s3://logs/rmq", "0.0.0.0")
                assert settings.object_store.trusted_network
    assert "--advertise=archive.example:9876" in pods(objects)["serve"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"archive": {"url": ""}}, "/archive/url"),
        ({**REQUIRED, "archives": {}}, "additional properties 'archives' not allowed"),
        ({"archive": {"url": "s3://logs/rmq"}}, "broker.nameServers is required"),
        ({**REQUIRED, "sidecar": {"environment": {"BATCH": 1}}}, "BATCH"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    done = helm("template", "t", values=values, directory=tmp_path)
    assert done.returncode != 0 and said in done.stderr


OWN_BROKER = """apiVersion: apps/v1
kind: StatefulSet
metadata: {name: own}
spec:
  serviceName: own
  selector: {matchLabels: {app: own}}
  template:
    metadata: {labels: {app: own}}
    spec:
%s
  volumeClaimTemplates:
    - metadata: {name: tiered-state}
      spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 4Gi}}}
"""


def test_own_broker_chart_includes_the_sidecar_as_the_page_says(tmp_path: Path) -> None:
    """Another chart with the lines of docs/INSTALL.md, and this one as its dependency."""
    page = (ROOT / "docs" / "INSTALL.md").read_text("utf-8")
    block = (
        page.partition("**Your own broker chart.**")[2].split("\n\n")[1].replace("    …", "    image: broker")
    )
    own = tmp_path / "own"
    (own / "templates").mkdir(parents=True)
    (own / "charts").mkdir()
    shutil.copytree(CHART, own / "charts" / CHART.name)
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    (own / "Chart.yaml").write_text(
        json.dumps(
            {
                "apiVersion": "v2",
                "name": "own",
                "version": "1.0.0",
                "dependencies": [{"name": CHART.name, "version": version}],
            }
        )
    )
    indented = textwrap.indent(textwrap.dedent(block), 6 * " ")
    (own / "templates" / "broker.yaml").write_text(OWN_BROKER % indented)
    values = {CHART.name: {**FULL, "broker": {"enabled": False}}}
    lint = helm("lint", "--strict", values=values, directory=tmp_path, chart=own)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    objects = rendered(values, tmp_path, own)
    check_against_kubernetes(objects)
    assert ("StatefulSet", "t-rocketmq-tiered-broker") not in objects
    pod = objects[("StatefulSet", "own")]["spec"]["template"]["spec"]
    ours = next(one for one in rendered(FULL, tmp_path).values() if one["kind"] == "StatefulSet")
    sidecar = next(one for one in ours["spec"]["template"]["spec"]["containers"] if one["name"] == "tiered")
    assert [one["name"] for one in pod["containers"]] == ["broker", "tiered"]
    assert pod["containers"][1] == sidecar
    mounted = {one["name"] for one in sidecar["volumeMounts"]}
    assert mounted - {one["name"] for one in pod["volumes"]} == {"store", "broker-conf", "tiered-state"}
    assert ("ConfigMap", "t-rocketmq-tiered-settings") in objects

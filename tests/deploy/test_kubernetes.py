"""The kustomize set: what kubectl makes of it is what is kept here, and that agrees with the image, the compose file and the
settings.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.options import Options
from inference.dialects import declared_dialects
from tests.conftest import ROOT
from tests.deploy.compose import services

FOLDER = ROOT / "deploy" / "kubernetes"
GOLDENS = Path(__file__).parent / "goldens"
WITH_COMPONENTS = "components: [cuda, monitoring]\n"
PRODUCTION_STACK = {
    "repository", "tag", "modelURL", "replicaCount", "requestCPU", "requestMemory", "limitCPU", "limitMemory", "pvcStorage",
    "maxModelLen", "dtype", "maxNumSeqs", "tensorParallelSize",
}  # fmt: skip
"""Names of helm/values.yaml in vLLM's production-stack, commit 00c38d1a: servingEngineSpec.modelSpec and its vllmConfig."""


def documents(name: str = "kubernetes.yaml") -> dict[tuple[str, str], dict[str, Any]]:
    found = list(yaml.safe_load_all((GOLDENS / name).read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


DOCUMENTS = documents()
POD = DOCUMENTS["StatefulSet", "dragoman"]["spec"]["template"]["spec"]
CONTAINERS = {each["name"]: each for each in [*POD["initContainers"], *POD["containers"]]}
PODS = [each["spec"]["template"]["spec"] for (kind, _), each in DOCUMENTS.items() if kind == "StatefulSet"]


def rendered(folder: Path) -> str:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl is installed on this machine")
    done = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_golden():
    assert rendered(FOLDER) == (GOLDENS / "kubernetes.yaml").read_text()


def test_golden_with_components(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "set")
    file = tmp_path / "set" / "kustomization.yaml"
    file.write_text(file.read_text() + WITH_COMPONENTS)
    assert rendered(tmp_path / "set") == (GOLDENS / "kubernetes-cuda-monitoring.yaml").read_text()


def test_values_reach_their_places(tmp_path):
    """Every value is used: another one changes the result."""
    values = yaml.safe_load((FOLDER / "values.yaml").read_text())
    assert set(values["data"]) == PRODUCTION_STACK
    shutil.copytree(FOLDER, tmp_path / "set")
    usual = rendered(FOLDER)
    for name in values["data"]:
        changed = {**values, "data": {**values["data"], name: "7"}}
        (tmp_path / "set" / "values.yaml").write_text(yaml.safe_dump(changed))
        assert rendered(tmp_path / "set") != usual, name


def test_a_registry_may_have_a_port(tmp_path):
    values = yaml.safe_load((FOLDER / "values.yaml").read_text())
    shutil.copytree(FOLDER, tmp_path / "set")
    values["data"] |= {"repository": "localhost:5000/team/dragoman", "tag": "1.2"}
    (tmp_path / "set" / "values.yaml").write_text(yaml.safe_dump(values))
    lines = {line.strip() for line in rendered(tmp_path / "set").splitlines() if "dragoman:" in line}
    assert {line for line in lines if line.startswith("image:")} == {"image: localhost:5000/team/dragoman:1.2"}


def test_nothing_is_left_to_fill_in_and_the_values_stay_here():
    text = (GOLDENS / "kubernetes.yaml").read_text()
    assert "from-values" not in text
    assert "repository:tag" not in text
    assert ("ConfigMap", "values") not in DOCUMENTS
    assert {each["metadata"]["namespace"] for each in DOCUMENTS.values()} == {"dragoman"}


def test_every_setting_exists():
    known = {f"DRAGOMAN_{name.upper()}" for name in Options.model_fields}
    known |= {
        f"DRAGOMAN_{name.upper()}"
        for each in declared_dialects()
        if each.settings
        for name in each.settings.model_fields
    }
    data = DOCUMENTS["ConfigMap", "dragoman"]["data"]
    assert set(data) - known == {"WORKERS"}
    assert "$(WORKERS)" in CONTAINERS["deploy"]["args"]
    options = {name: data[name] for name in data if name != "WORKERS"}
    for name in [name for name in options if name.endswith("_FILE")]:
        path = Path(options.pop(name))
        assert any(Path(mount["mountPath"]) in path.parents for mount in CONTAINERS["web"]["volumeMounts"]), path
    read = {name.removeprefix("DRAGOMAN_").lower(): value for name, value in options.items()}
    assert Options(**{**read, "allowed_hosts": [".dragoman.svc"]}).behind_tls


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["containers"][0]["name"])
def test_pods_have_no_privileges(pod):
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        locks = container["securityContext"]
        assert locks == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"]
    for volume in pod["volumes"]:
        assert "hostPath" not in volume
        assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440


def test_the_pod_runs_what_the_compose_file_runs():
    compose = services()
    for name in ("migrate", "web", "reconcile"):
        assert CONTAINERS[name]["args"] == compose[name].command[1:], name
        assert str(POD["securityContext"]["runAsUser"]) == compose[name].user.partition(":")[0]
    assert CONTAINERS["deploy"]["args"][:3] == compose["deploy"].command[1:]
    assert CONTAINERS["reconcile"]["startupProbe"]["exec"]["command"] == compose["reconcile"].health
    order = [each["name"] for each in POD["initContainers"]]
    assert order == ["migrate", "deploy", "reconcile"]
    assert CONTAINERS["reconcile"]["restartPolicy"] == "Always"


def test_the_service_offers_every_port_of_the_image():
    ports = {each["name"]: each["containerPort"] for each in CONTAINERS["web"]["ports"]}
    assert set(ports.values()) == set(services()["web"].image.ports)
    offered = DOCUMENTS["Service", "dragoman"]["spec"]["ports"]
    assert {each["targetPort"] for each in offered} == set(ports)
    assert {each["name"]: each["port"] for each in offered} == {**ports, "front": 80}
    assert all(len(name) <= 15 and re.fullmatch(r"[a-z0-9-]+", name) for name in ports)
    policy = DOCUMENTS["NetworkPolicy", "dragoman"]["spec"]["ingress"]
    assert {port["port"] for rule in policy for port in rule["ports"]} == set(ports.values())


def test_secrets_are_files_of_secrets_that_the_pages_name():
    page = (ROOT / "docs" / "containers.md").read_text()
    named = {volume["secret"]["secretName"] for pod in PODS for volume in pod["volumes"] if "secret" in volume}
    named |= {
        each["valueFrom"]["secretKeyRef"]["name"]
        for container in CONTAINERS.values()
        for each in container.get("env", [])
        if "valueFrom" in each
    }
    assert named == {"dragoman-database", "dragoman-keys", "dragoman-hub"}
    for name in named:
        assert f"secret generic {name} " in page, name
    assert ("Secret", "dragoman-database") not in DOCUMENTS

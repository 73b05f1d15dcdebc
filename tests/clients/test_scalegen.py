"""ScaleGenAI's released command line, unmodified, against the control plane alone: every call that it makes.

Its login needs the vendor's own identity provider, so a cached token stands in its place; the rest is as released.
"""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests import calls
from tests.conftest import DEMO, ROOT
from tests.control_plane import ControlPlane

PROGRAM = ROOT / ".venv-scalegen" / "bin" / "scalegen"
FAR_FUTURE = 4_102_444_800
ADAPTERS = ROOT / "models" / "demo-adapters"


class Cli:
    """`scalegen infer ...` with a home folder of its own."""

    def __init__(self, url, home, token="none"):
        self.url, self.home = url, home
        cache = home / ".scaletorch" / "creds_cache"
        cache.parent.mkdir(parents=True)
        credentials = {"client_id": "x", "client_secret": "y", "access_token": token, "expires_at": FAR_FUTURE}
        cache.write_text(json.dumps(credentials))

    def __call__(self, *arguments, group="infer"):
        """What the program prints; it ends with 0 in any case."""
        assert PROGRAM.exists(), "the client's environment is missing: run `make setup-dev`"
        environment = {"HOME": str(self.home), "ST_PLATFORM_API": self.url, "COLUMNS": "300", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            [PROGRAM, group, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def create(self, *options, name="chat", model=str(DEMO), kind="llm"):
        """Create a deployment; returns its id and what was printed."""
        text = self("create", "--name", name, "--model", model, "--inf_type", kind, *options)
        found = re.search(r"Created deployment - Id: (\S+)", text)
        assert found, text
        return found[1], text


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    running = ControlPlane(tmp_path_factory.mktemp("control") / "var").start()
    yield running
    running.stop()


@pytest.fixture
def cli(plane, tmp_path):
    return Cli(plane.url, tmp_path)


@pytest.fixture
def get(plane):
    """The deployment as the API shows it."""
    return lambda inf_id: calls.get(f"{plane.url}/sg_inf/{inf_id}").json()


def row_of(text, inf_id):
    """The cells of a deployment's row in a printed table."""
    line = next(line for line in text.splitlines() if inf_id in line and "║" in line)
    return [cell.strip() for cell in re.split("[║│]", line) if cell.strip()]


def test_an_empty_list(tmp_path):
    alone = ControlPlane(tmp_path / "var").start()
    try:
        assert "No deployments found" in Cli(alone.url, tmp_path / "home")("list")
    finally:
        alone.stop()


@pytest.mark.smoke
def test_create_and_list(cli):
    inf_id, text = cli.create()
    assert "New Deployment Added" in text
    assert row_of(text, inf_id) == [inf_id, "chat", str(DEMO), "False", "0.0", "PROVISIONING"]
    assert row_of(cli("list"), inf_id)[-1] == "PROVISIONING"


def test_create_with_every_option(cli, get):
    inf_id, _ = cli.create(
        "--base_model", "b", "--engine", "vllm", "--hf_token", "hf_secret", "--logs_store", "s3", "--max_price_per_hour",
        "3", "--cloud_regions", "AWS:us-east-1", "--cloud_regions", "AWS:eu", "--use_spot", "--enable_fast_autoscaling",
        "--lower_allowed_threshold", "0.5", "--upper_allowed_threshold", "2", "--scale_to_zero_timeout_sec", "60",
        "--scaling_down_timeout_sec", "61", "--scaling_up_timeout_sec", "62", "--scale_down_time_window_sec", "63",
        "--scale_up_time_window_sec", "64", "--autoscaling_strategy", "e2e_latency_sec", "--min_workers", "1",
        "--use_same_gpus_when_scaling", "--initial_workers_gpu_num", "2", "--initial_workers_gpu_type", "A100_80GB",
        "--strict_gpu_types", "--wait_for_preprov_nodes", "--use_ssl", "--use_public_url", "--controller_cloud_provider",
        "GCP", "--controller_cloud_region", "r", "--vpc_id", "v", "--lora_adapter", "pirate", str(ADAPTERS / "pirate"),
        "--lora_adapter_hf_token", "pirate", "hf_secret", "--agentic_deployment", "--vllm_extra_args",
        "--max-num-seqs 8", "--max_model_len", "64", "--throughput_optimized",
    )  # fmt: skip
    found = get(inf_id)
    assert found["hf_token"] == "***"
    assert found["llm_loras"] == [{"name": "pirate", "hf_repo": str(ADAPTERS / "pirate"), "hf_token": None}]
    assert found["cloud_providers"] == [{"name": "AWS", "regions": ["us-east-1", "eu"]}]
    assert found["autoscaling_config"] == {
        "scale_up_time_window_sec": 64, "scale_down_time_window_sec": 63, "scaling_up_timeout_sec": 62,
        "scaling_down_timeout_sec": 61, "scale_to_zero_timeout_sec": 60, "enable_speedup_shared": False,
        "enable_fast_autoscaling": True, "scale_to_zero": False, "autoscaling_strategy": "e2e_latency_sec",
        "upper_allowed_threshold": 2.0, "lower_allowed_threshold": 0.5, "upper_allowed_latency_sec": 1.0,
        "lower_allowed_latency_sec": 0.2,
    }  # fmt: skip
    assert found["initial_worker_config"] == {
        "min_workers": 1, "initial_workers_gpu": "A100_80GB", "initial_workers_gpu_num": 2, "use_other_gpus": False,
        "instance_types": [], "use_on_prem": False, "use_cloudburst": False, "on_prem_node_ids": [],
        "expand_gpu_types": False, "max_workers": 100, "wait_for_preprov_nodes": True,
    }  # fmt: skip
    assert (found["controller_cloud_config"]["cloud_provider"], found["controller_cloud_config"]["vpc_id"]) == (
        "GCP",
        "v",
    )
    assert (found["allow_spot_instances"], found["max_price_per_hour"], found["max_model_len"]) == (True, 3.0, 64)
    assert found["metadata"]["extra"] == {}


def test_launch_from_a_file(cli, get, tmp_path):
    file = tmp_path / "deployment.yaml"
    file.write_text(f"name: yaml\nmodel: {DEMO}\ncontroller_on_prem_config: {{use_ssl: false}}\n")
    text = cli("launch", str(file))
    inf_id = re.search(r"Id: (\S+)", text)[1]
    assert get(inf_id)["controller_on_prem_config"] == {"use_ssl": False, "on_prem_node_id": None}


def test_an_embedding(cli, get):
    inf_id, _ = cli.create("--autoscaling_strategy", "rps_per_worker", kind="embedding", model="org/embedder")
    assert get(inf_id)["link"].endswith(f"/deployments/{inf_id}/")
    assert f"/deployments/{inf_id}/inference/embed" in cli("view", inf_id)
    inf_id, _ = cli.create(kind="embedding", model="org/embedder")  # the program sends its default, ttft
    assert get(inf_id)["autoscaling_config"]["autoscaling_strategy"] == "rps_per_worker"


def test_view_shows_the_endpoint_and_its_key(cli, plane):
    inf_id, _ = cli.create()
    text = cli("view", inf_id)
    key = calls.get(f"{plane.url}/secret/AUTH_ENDPOINT_KEY_{inf_id}").json()["secret"][f"AUTH_ENDPOINT_KEY_{inf_id}"]
    for shown in (inf_id, f"http://127.0.0.1:8000/deployments/{inf_id}/inference", key, "ttft_latency_sec", str(DEMO)):
        assert shown in text


def test_start_and_stop(cli, get):
    inf_id, _ = cli.create()
    assert "is not active" in cli("stop", inf_id)  # no worker is ready here, and the program looks first
    assert "sent successfully" in cli("stop", "-f", inf_id)
    assert get(inf_id)["status"] == "INACTIVE"
    assert "sent successfully" in cli("stop", "-f", inf_id)
    text = cli("start", inf_id)
    assert "Deployment started!" in text
    assert row_of(text, inf_id)[-1] == "PROVISIONING"


def test_delete_and_view_what_was_deleted(cli):
    inf_id, _ = cli.create()
    text = cli("delete", inf_id)
    assert "is successful" in text
    assert row_of(text, inf_id)[-1] == "DELETING"
    assert row_of(cli("list"), inf_id)[-1] == "DELETING"
    assert "is successful" in cli("delete", "-f", inf_id)
    assert "Could not scale up deployment" in cli("start", inf_id)


def test_unknown_deployments(cli):
    for command in ("view", "start", "stop"):
        assert "Deployment with inf_id none not found" in cli(command, "none")
    assert "Could not delete deployment" in cli("delete", "none")


def test_refusals_are_shown(cli):
    text = cli("create", "--name", "n", "--model", "/etc", "--inf_type", "llm", "--max_model_len", "-3",
               "--upper_allowed_threshold", "0.1")  # fmt: skip
    assert "Couldn't not create deployment" in text
    for field in ("max_model_len", "autoscaling_config.lower_allowed_threshold"):
        assert field in text


def test_update_of_what_was_created(cli, plane):
    """The program has no update; the body is its vendor's."""
    inf_id, _ = cli.create()
    body = {"initial_worker_config": {"min_workers": 2}, "autoscaling_config": None, "imidiate_scale_down": False,
            "max_price_per_hour": 5, "min_throughput_rate": None, "allow_spot_instances": None, "llm_loras": []}  # fmt: skip
    assert calls.put(f"{plane.url}/sg_inf/{inf_id}", json=body).json() == {"success": True, "message": "updated"}
    assert "Minimum workers : 2" in cli("view", inf_id)
    assert "Maximum price per hr : 5.0" in cli("view", inf_id)


def test_two_creates_at_once_are_two_deployments(cli, get):
    with ThreadPoolExecutor(2) as pool:
        ids = [inf_id for inf_id, _ in pool.map(lambda _: cli.create(name="twin"), range(2))]
    assert len(set(ids)) == 2
    found = [get(inf_id) for inf_id in ids]
    assert [each["name"] for each in found] == ["twin", "twin"]
    names = {each["metadata"]["deployment"] for each in found}
    assert len(names) == 2
    assert "twin" in names


def test_many_changes_at_once(plane):
    """More at once than processes of the program would make; each has one effect."""
    with httpx.Client(base_url=plane.url, timeout=60) as client, ThreadPoolExecutor(8) as pool:
        body = {"name": "many", "model": str(DEMO)}
        created = list(pool.map(lambda _: client.post("/sg_inf/create", json=body), range(8)))
        ids = [answer.json()["message"]["inf_id"] for answer in created]
        assert len(set(ids)) == 8
        deleted = list(pool.map(lambda _: client.delete(f"/sg_inf/{ids[0]}?force=False"), range(8)))
        assert [answer.status_code for answer in deleted] == [200] * 8
        assert sorted(answer.json()["message"] for answer in deleted) == ["already deleted"] * 7 + ["deleting"]
        changes = [
            {"max_price_per_hour": 7},
            {"initial_worker_config": {"max_workers": 9}},
            {"allow_spot_instances": True},
        ]
        list(pool.map(lambda change: client.put(f"/sg_inf/{ids[1]}", json=change), changes))
        found = client.get(f"/sg_inf/{ids[1]}").json()
        assert (found["max_price_per_hour"], found["allow_spot_instances"]) == (7.0, True)
        assert found["initial_worker_config"]["max_workers"] == 9


def test_two_deletes_at_once(cli, get):
    inf_id, _ = cli.create()
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda _: cli("delete", inf_id), range(2)))
    assert all("is successful" in text for text in texts)
    assert get(inf_id)["status"] == "DELETING"


def test_keys(tmp_path):
    plane = ControlPlane(tmp_path / "var", {"DRAGOMAN_REQUIRE_API_KEY": "true"}).start()
    try:
        assert "Could not fetch deployments" in Cli(plane.url, tmp_path / "none")("list")
        infer, manage = (plane.manage("createkey", "k", "--scope", scope).strip() for scope in ("infer", "manage"))
        assert "Could not fetch deployments" in Cli(plane.url, tmp_path / "infer", infer)("list")
        cli = Cli(plane.url, tmp_path / "manage", manage)
        inf_id, _ = cli.create("--hf_token", "hf_secret")
        assert "APIKey" in cli("view", inf_id)
        assert "hf_secret" not in plane.log
        assert manage not in plane.log
    finally:
        plane.stop()


def test_foreign_pages_are_refused(plane):
    headers = {"Origin": "https://evil.example"}
    assert calls.post(f"{plane.url}/sg_inf/create", json={}, headers=headers).status_code == 403
    assert calls.get(f"{plane.url}/sg_inf/list", headers={"Host": "evil.example"}).status_code == 403

"""The Dockerfile, the compose file and the variables agree with each other and keep the rules that containers have here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from config.options import Options
from inference.dialects import declared_dialects
from tests.conftest import ROOT
from tests.deploy.compose import load, services, variables
from tests.deploy.dockerfile import DockerfileError, chain, expand, image_of, read_stages

DOCKERFILE = ROOT / "Dockerfile"
EXAMPLE = (ROOT / ".env.example").read_text()
EXAMPLES = dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", EXAMPLE, re.M))
STAGES = {device: read_stages(DOCKERFILE, {"DEVICE": device}) for device in ("cpu", "cuda")}
SERVICES = services(**{})
NAMES = sorted(SERVICES)
MAKERS = {"database-secret": "secrets", "redis-secret": "secrets", "grafana-secret": "secrets", "metrics-secret": "metrics-key",
          "loadtest-secret": "loadtest-key"}  # fmt: skip
BUILD_TOOLS = re.compile(r"\b(gcc|g\+\+|clang|make|build-essential|rustc|cargo)\b")


def runs(device: str, target: str = "") -> str:
    """The commands that make the image itself, those of other stages left out."""
    stages = chain(STAGES[device], target)
    return "\n".join(each.value for stage in stages for each in stage.instructions if each.keyword == "RUN")


def test_the_example_explains_every_variable_and_no_other():
    settings = {f"DRAGOMAN_{name.upper()}" for name in Options.model_fields}
    settings |= {
        f"DRAGOMAN_{name.upper()}"
        for each in declared_dialects()
        if each.settings
        for name in each.settings.model_fields
    }
    used = variables()
    assert set(used) <= set(EXAMPLES)
    others = set(EXAMPLES) - set(used)
    assert others - settings == {"HF_TOKEN"}, "a variable that nothing reads"
    for name, default in used.items():
        assert EXAMPLES[name] == default, f"{name} has another default"
        assert re.search(rf"^# .*\n(?:[#A-Z].*\n)*{name}=", EXAMPLE, re.M), f"{name} is not explained"


@pytest.mark.parametrize("name", NAMES)
def test_a_service_has_no_privileges(name):
    service = SERVICES[name]
    assert service.fields["read_only"] is True
    assert service.fields["cap_drop"] == ["ALL"]
    assert service.fields["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service.fields
    assert "cap_add" not in service.fields
    uid, _, _ = service.user.partition(":")
    assert uid.isdigit()
    assert uid != "0"


@pytest.mark.parametrize("name", NAMES)
def test_a_service_has_limits_and_a_health_check(name):
    service = SERVICES[name]
    assert service.fields["mem_limit"]
    assert service.fields["logging"]["options"]["max-size"]
    if service.once:
        assert not service.health or name == "loadtest"
    else:
        assert service.fields["restart"] == "unless-stopped"
        assert service.health
        assert service.fields["cpus"]
    tag = service.fields["image"].partition(":")[2]
    assert tag
    assert tag != "latest" or service.ours


@pytest.mark.parametrize("name", NAMES)
def test_secrets_are_files_that_one_service_makes(name):
    service = SERVICES[name]
    for variable, value in service.environment.items():
        if re.search(r"PASSWORD|SECRET|KEY|URL|TOKEN", variable):
            assert variable.endswith("_FILE") or variable.endswith("__FILE"), variable
            assert value.startswith("/secrets/"), variable
    for volume, path, read_only in service.volumes:
        if volume in MAKERS:
            assert path.startswith("/secrets/")
            assert read_only == (MAKERS[volume] != name)
    for text in service.command:
        assert not re.search(r"password=|:[^/{}@]+@", text), text


def test_volumes_and_networks_are_declared():
    declared = load()
    named = {volume for service in SERVICES.values() for volume, _, _ in service.volumes if not volume.startswith(".")}
    assert named == set(declared["volumes"])
    assert {net for each in SERVICES.values() for net in each.fields["networks"]} == set(declared["networks"])
    assert declared["networks"]["registry"] == {"internal": True}
    assert SERVICES["postgres"].fields["networks"] == SERVICES["redis"].fields["networks"] == ["registry"]
    for service in SERVICES.values():
        for source, _, _ in service.volumes:
            assert not source.startswith(".") or (ROOT / source).is_dir(), source
        assert set(service.depends_on) <= set(SERVICES)


@pytest.mark.parametrize("name", [name for name in NAMES if SERVICES[name].ours])
def test_a_new_volume_belongs_to_the_service(name):
    service = SERVICES[name]
    owner = int(service.user.partition(":")[0])
    for volume, path, _ in service.volumes:
        assert volume.startswith(".") or service.owners.get(path) == owner, f"root would own {path}"


def test_a_new_reconciler_is_the_same_machine():
    """Its limits are stored under its host name, which Docker would make up for each container."""
    assert SERVICES["reconcile"].fields["hostname"] == "reconcile"


def test_ports_are_published_on_this_machine_alone():
    published = {}
    for service in SERVICES.values():
        for text in service.fields.get("ports", []):
            address, outer, inner = text.split(":")
            assert (address, outer) == ("127.0.0.1", inner), text
            first, _, last = inner.partition("-")
            published.update({port: service.name for port in range(int(first), int(last or first) + 1)})
    assert {port for port, name in published.items() if name == "web"} == set(SERVICES["web"].image.ports)
    assert services(BIND_ADDRESS="10.0.0.1")["web"].fields["ports"][0] == "10.0.0.1:8000:8000"


def test_what_the_server_serves_is_exposed():
    options, served = Options(), set()
    served |= {options.front_port, options.control_port}
    for dialect in declared_dialects():
        served |= {port for _, port in dialect.set_up(options).addresses.values() if port}
    assert served == set(SERVICES["web"].image.ports)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_image(device):
    image = image_of(STAGES[device])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", image.user)
    assert (image.entrypoint, image.command) == (["dragoman"], ["serve"])
    assert image.health == ["dragoman", "health"]
    assert image.stop_signal == "SIGTERM"
    assert image.volumes == ["/data"]
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "DRAGOMAN_DATA_DIR"):
        assert Path(image.environment[name]).is_relative_to("/data"), name
    for name in ("title", "licenses", "version", "revision", "created"):
        assert image.labels[f"org.opencontainers.image.{name}"]


def test_only_cuda_images_have_a_compiler():
    assert not BUILD_TOOLS.search(runs("cpu"))
    assert not BUILD_TOOLS.search(runs("cpu", "loadtest"))
    assert BUILD_TOOLS.search(runs("cuda"))


def test_the_build_installs_by_lock_with_hashes():
    builder = next(stage for stage in STAGES["cpu"] if stage.name == "builder")
    commands = [each.value for each in builder.instructions if each.keyword == "RUN"]
    assert expand(commands[0], builder.arguments).endswith("requirements/serve.lock --torch cpu")
    assert all("pip install" not in command or "--no-index" in command for command in commands)
    locks = {path for command in commands for path in re.findall(r"requirements/[\w-]+\.lock", command)}
    for lock in locks | {"requirements/torch-cuda.lock", "requirements/loadtest.lock"}:
        lines = [line for line in (ROOT / lock).read_text().splitlines() if re.match(r"\S+==", line)]
        assert lines
        assert all(line.endswith("\\") for line in lines), lock


def test_the_builds_context_has_what_is_copied_and_little_else():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = {
        path.rstrip("/")
        for stage in STAGES["cpu"]
        for each in stage.instructions
        if each.keyword == "COPY" and "from" not in each.flags
        for path in each.words[:-1]
    }
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(Path(path).match(pattern) for pattern in kept), path
    assert {pattern for pattern in kept if not any(Path(path).match(pattern) for path in copied)} == set()


def test_torch_has_one_version():
    [pinned] = re.findall(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    for name in ("requirements/torch-cuda.in", "requirements/torch-cuda.lock"):
        assert re.search(rf"^{re.escape(pinned)}( \\)?$", (ROOT / name).read_text(), re.M), name


def test_what_the_reader_refuses(tmp_path):
    for text in ("RUN true\n", "FROM a\nINSTALL b\n", "FROM a\nADD b c\n"):
        (tmp_path / "Dockerfile").write_text(text)
        with pytest.raises(DockerfileError):
            read_stages(tmp_path / "Dockerfile")

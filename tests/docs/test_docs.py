"""The documentation says what is there: settings, routes, commands, and examples that run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from config.options import Options
from inference.dialects import declared_dialects
from tests.conftest import ROOT
from tests.live import LiveServer, free_port
from tools.docs.options_table import written

CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
DIALECTS = (ROOT / "docs" / "dialects.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
MARKDOWN = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("loadtests/*.md")]


def test_every_setting_is_documented_and_every_documented_setting_exists():
    classes = [Options, *(dialect.settings for dialect in declared_dialects() if dialect.settings is not None)]
    variables = [variable for each in classes for variable in environment_variables(each)]
    assert len(variables) == len(set(variables)), "two settings have one name"
    ours = {name.removeprefix("DRAGOMAN_") for name in variables if name.startswith("DRAGOMAN_")}
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", CONFIGURATION, re.M)) == ours
    pages = "".join(page.read_text() for page in MARKDOWN)
    for vendors in set(variables) - {f"DRAGOMAN_{name}" for name in ours}:
        assert f"`{vendors}`" in pages, vendors


def environment_variables(settings):
    """The names that a settings class reads its fields from."""
    for name, field in settings.model_fields.items():
        alias = field.validation_alias
        if alias is None:
            yield f"DRAGOMAN_{name.upper()}"
        else:
            yield from [alias] if isinstance(alias, str) else alias.choices


def test_the_tables_of_engine_options_are_those_of_the_engine():
    assert written(CONFIGURATION) == CONFIGURATION, "python -m tools.docs.options_table writes them"
    assert "| `MAX_NUM_SEQS` | 64 | 1 to 4096 |" in CONFIGURATION
    assert "| `prefix_caching` | true | `true`, `false` |" in CONFIGURATION


@pytest.mark.full
def test_every_route_of_the_front_plane_is_documented(server):
    own = ("/docs", "/docs/", "/docs/{name}", "/openapi.json", "/api-doc/openapi.json", "/metrics")
    for path in server.get("/openapi.json").json()["paths"]:
        assert f"`{path}`" in DIALECTS or f" {path}`" in DIALECTS or path in own, path


def test_every_route_of_mindies_planes_is_documented():
    from inference.dialects.mindie.routes import route_sets
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.workers.router import EngineRouter
    from management.snapshot import SnapshotHolder

    page = (ROOT / "docs" / "mindie.md").read_text()
    state = MindieState(MindieSettings(), EngineRouter(SnapshotHolder(), True), print)
    routes = [route for routes in route_sets(state).values() for route in routes.routes]
    assert routes
    for route in routes:
        path = route.plain_path.replace("/versions/{version}", "")
        assert f"`{route.method} {path}`" in page, path


def test_every_route_of_torchserves_planes_is_documented():
    from inference.dialects.torchserve.routes import route_sets

    page = (ROOT / "docs" / "torchserve.md").read_text()
    routes = [route for routes in route_sets(None).values() for route in routes.routes]
    assert routes
    for route in routes:
        assert f"`{route.method} {route.plain_path}`" in page, f"{route.method} {route.path}"


def test_every_refused_field_is_documented():
    from inference.dialects.openai.schema import NOT_SERVED

    for name in NOT_SERVED:
        assert f"`{name}`" in DIALECTS or (name.startswith("guided_") and "`guided_*`" in DIALECTS), name


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), f"{target}#{anchor}"


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/contributing.md", "CONTRIBUTING.md"])
def test_files_named_in_the_pages_for_contributors_exist(page):
    named = re.findall(
        r"`((?:engine|inference|management|config|benchmarks|tests)/[\w/.]+)`", (ROOT / page).read_text()
    )
    assert named
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_architecture_maps_every_package():
    documented = set(re.findall(r"^\| `([\w/]+)` \|", ARCHITECTURE, re.M))
    for folder in ("engine", "inference", "management", "config"):
        assert f"| files of `{folder}/` |" in ARCHITECTURE
        for package in (ROOT / folder).rglob("__init__.py"):
            name = package.parent.relative_to(ROOT).as_posix()
            has_code = any(file.name != "__init__.py" for file in package.parent.glob("*.py"))
            if name != folder and "migrations" not in name and (has_code or package.stat().st_size > 200):
                assert name in documented, name


def shell_commands():
    """(page, command) for every command of every shell block."""
    for page in MARKDOWN:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if command := line.partition("  #")[0].strip():
                    yield page.name, command


COMMANDS = list(shell_commands())
ELSEWHERE = (
    "make ",  # test_make_targets_named_in_the_documentation_exist
    "pip wheel . --no-deps",  # tests/server/test_wheel.py
    "pip install dist/dragoman-*.whl",  # the same; its dependencies need the network
    "docker ",  # tests/deploy/test_parity.py runs what the compose file says
    "kubectl ",  # tests/deploy/test_kubernetes.py
    "password=$(openssl ",  # a shell's own, for the line after it
)
"""Beginnings of commands that are not run here."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with every plane that the documentation calls."""
    environment = {"DRAGOMAN_TORCHSERVE_INFERENCE_PORT": str(free_port())}
    live = LiveServer(tmp_path_factory.mktemp("documented") / "var", environment=environment).start()
    yield live
    assert live.stop() == 0, live.log


@pytest.mark.parametrize("command", [command for _, command in COMMANDS if command.startswith("curl ")])
def test_requests_in_the_documentation_are_answered(server, command):
    ports = {8000: server.front_port, 8085: server.djl_port, 1025: server.mindie_port,
             8090: server.environment["DRAGOMAN_TORCHSERVE_INFERENCE_PORT"]}  # fmt: skip
    for shown, port in ports.items():
        command = command.replace(f"http://127.0.0.1:{shown}/", f"http://127.0.0.1:{port}/")
    command = command.replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout or '"generated_text":"' in done.stdout or '"text":"' in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    sorted({command for _, command in COMMANDS if not command.startswith(("curl ", *ELSEWHERE))}),
)
def test_commands_in_the_documentation_exist(command):
    """Each is one of ours, and explains itself."""
    words = re.sub(r"^([A-Z_]+=\S+ )+", "", command).split()
    if words[:2] == [".venv/bin/python", "manage.py"]:
        program = ["manage.py", words[2]]
    elif words[:2] == [".venv/bin/python", "-m"]:
        program = ["-m", words[2]]
    else:
        assert words[0] == "dragoman", f"{command}: say how it is tested, here or in ELSEWHERE"
        program = ["-m", *words[:2]]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *program, "--help"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_docker_compose_has_the_services_that_the_documentation_names():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    named = [command.split()[3] for _, command in COMMANDS if command.startswith("docker compose exec ")]
    assert named
    assert set(named) <= set(services)


def test_make_targets_named_in_the_documentation_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in MARKDOWN:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), target


def test_modules_named_in_the_documentation_exist():
    for page in MARKDOWN:
        for module in re.findall(r"python -m ((?:tools|loadtests|benchmarks|engine|tests)[\w.]*)", page.read_text()):
            path = ROOT / module.rstrip(".").replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (page.name, module)


def test_every_tool_says_who_uses_it():
    rows = set(re.findall(r"^\| `(tools[\w.]*)` \| \S", (ROOT / "tools" / "README.md").read_text(), re.M))
    programs = {path for path in (ROOT / "tools").rglob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert rows == {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in programs}


def test_files_stay_readable():
    for folder in ("engine", "inference", "management", "config", "loadtests", "benchmarks", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            if "migrations" not in path.parts:
                assert len(path.read_text().splitlines()) <= 400, path


def test_nothing_unpickles_or_evaluates():
    forbidden = re.compile(
        r"\b(pickle|marshal|shelve|dill|cloudpickle)\b|torch\.load|(?<!\.)\beval\(|\bexec\(|yaml\.load|shell=True"
    )
    for folder in ("engine", "inference", "management", "config"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                assert not forbidden.search(line) or "pickled" in line, (path, line)


@pytest.mark.full
def test_benchmarks_and_load_tests_explain_themselves():
    own = (
        "tools.bench.server",
        "tools.bench.web",
        "tools.bench.sweep_families",
        "tools.release.demo_model",
        "tests.models.random_models",
    )
    others = ("benchmarks.curve", "benchmarks.report", "benchmarks.plot", "loadtests", "loadtests.history")
    for name in (*own, *others):
        done = subprocess.run([sys.executable, "-m", name, "--help"], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, name

"""Runs vLLM's own HTTP tests, unmodified, against this server, and prints what passed in each file.

    python -m tools.suites.vllm CHECKOUT --python PYTHON [-k WORDS] [FILE ...]

CHECKOUT is a working copy of github.com/vllm-project/vllm or its unpacked source distribution, and PYTHON an interpreter with the
packages of its requirements/common.txt, torch, pytest, pytest-asyncio and tblib; vLLM itself is not installed and not
compiled. A FILE is a path below its folder `tests`.

Nothing is written into the checkout. Its tests are copied into a temporary folder, and import vLLM's own Python sources. There
`vllm serve` is this script, which starts `manage.py serve`. Every model that the tests name is the demo model with a longer
context, an encoder with random weights, or an adapter of the demo model, in a hub cache of the suite; nothing is downloaded.
What a test expects of its model's own words therefore fails.

It never changes a test, and never leaves out a flag in silence: flags without effect on HTTP are dropped (`DROPPED`), any other
one is passed on, and this server refuses it if it cannot act.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
DEMO, ADAPTERS = ROOT / "models" / "demo", ROOT / "models" / "demo-adapters"
HOME = "VLLM_SUITE"
"""The environment variable with the temporary folder."""
REVISION = "0" * 40
CONTEXT = 32768
"""The context of the demo model's copies: tests ask for up to 18,192 tokens."""
LONGEST = 8192
"""The longest sequence that is served: the demo model does not end what it was not taught, which takes long."""
FIRST_PORT = 21100
HUB_NAME = re.compile(r'"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"')
PEOPLES_ADAPTERS = {
    "charent/self_cognition_Alice": "pirate",
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": "pirate",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": "json",
    "peft-internal-testing/opt-125m-dummy-lora": "json",
    "typeof/zephyr-7b-beta-lora": "pirate",
    "minpeter/LoRA-Llama-3.2-1B-tool-vllm-ci": "json",
    "jekunz/smollm-135m-lora-fineweb-faroese": "pirate",
}
ENCODERS = re.compile(r"e5-|embed|bge-(base|m3|reranker)|MiniLM|cross-encoder|colbert|colpali|Reranker")
FOLDERS = ("entrypoints", "tool_use")
"""Folders of tests whose files are run if they start a server."""
OTHERS = re.compile(
    r"multimodal|vision|speech_to_text|_vlm|offline|tensorizer|_mteb|return_routed_experts|lmeval|harmony"
    r"|serving_chat|serving_responses|namespace|muse"
)
"""Files about pictures, sounds, vLLM's Python interface and classes, data sets, and models of one family alone."""
DROPPED = {
    "--enforce-eager": 0, "--gpu-memory-utilization": 1, "--seed": 1, "--trust-remote-code": 0, "--load-format": 1,
    "--tool-call-parser": 1, "--reasoning-parser": 1, "--shutdown-timeout": 1, "--disable-log-stats": 0,
    "--disable-uvicorn-access-log": 0, "--disable-log-requests": 0, "--enable-chunked-prefill": 0,
    "--attention-backend": 1, "--runner": 1, "--limit-mm-per-prompt": 1, "--enable-tokenizer-info-endpoint": 0,
    "--enable-server-load-tracking": 0, "--tokenizer-mode": 1, "--config-format": 1, "--ignore-patterns": 1,
    "--model-impl": 1, "--no-async-scheduling": 0, "--chat-template-content-format": 1,
    "--pooler-config": 1, "--enable-request-id-headers": 0, "--enable-scale-out": 0, "--api-server-count": 1,
    "--enable-per-request-metrics": 0, "--structured-outputs-config.backend": 1,
}  # fmt: skip
"""Flags that this server refuses and HTTP does not show, each with its number of values."""
TEMPLATE = "--chat-template"
"""This flag is refused too, for the model's own template, so the model gets this one."""
FILE_TIMEOUT_S = 900
SHIM = '#!/bin/sh\ncd "{root}" && exec "{python}" -W ignore -m tools.suites.vllm --shim "$@"\n'
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"


def main() -> int:
    """Run the files; returns 1 if a case failed."""
    if sys.argv[1:2] == ["--shim"]:
        return shim(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the tests")
    parser.add_argument("-k", default="", help="pytest's choice of cases")
    parser.add_argument("--logs", type=Path, help="folder for the output of each file")
    parser.add_argument("files", nargs="*", help="files below `tests`; without any, all that start a server")
    options = parser.parse_intermixed_args()
    checkout = options.checkout.resolve()
    files = options.files or server_files(checkout / "tests")
    with tempfile.TemporaryDirectory(prefix="vllm-suite-") as folder:
        environment = prepare(Path(folder), checkout, files)
        rows = [run_file(name, Path(folder), environment, options) for name in files]
    print(f"{'file':70} {'cases':>6} {'passed':>6} {'failed':>6} {'errors':>6} {'skipped':>7}")
    for name, counts in [*zip(files, rows, strict=True), ("all", [sum(column) for column in zip(*rows, strict=True)])]:
        print(f"{name:70} {counts[0]:6} {counts[1]:6} {counts[2]:6} {counts[3]:6} {counts[4]:7}")
    return int(any(failed or errors for _, _, failed, errors, _ in rows))


def server_files(tests: Path) -> list[str]:
    """The files that start a server by themselves or with their folder's fixtures."""
    found = []
    for path in sorted(file for folder in FOLDERS for file in (tests / folder).rglob("test_*.py")):
        name = str(path.relative_to(tests))
        own = "RemoteOpenAIServer(" in path.read_text()
        lent = any(
            "RemoteOpenAIServer(" in (parent / "conftest.py").read_text() and "client" in path.read_text()
            for parent in (path.parent,)
            if (parent / "conftest.py").exists()
        )
        if (own or lent) and not OTHERS.search(name):
            found.append(name)
    return found


def prepare(home: Path, checkout: Path, files: list[str]) -> dict[str, str]:
    """Fill the temporary folder; returns the environment of the tests."""
    shutil.copytree(checkout / "tests", home / "tests")
    for name in ("vllm", "examples"):
        (home / name).symlink_to(checkout / name)
    version = next(
        line.partition(":")[2].strip()
        for line in (checkout / "PKG-INFO").read_text().splitlines()
        if line.startswith("Version:")
    )
    # vLLM takes its platform from its version's suffix.
    installed = home / f"vllm-{version}+cpu.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(METADATA.format(version=f"{version}+cpu"))
    program = home / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(SHIM.format(root=ROOT, python=sys.executable))
    program.chmod(0o755)
    for folder in ("tmp", "reports"):
        (home / folder).mkdir()
    make_hub(home, {name for file in files for name in names_in(home / "tests", file)})
    return {
        **os.environ,
        HOME: str(home),
        "HF_HOME": str(home / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(home / "tmp"),
        "VLLM_PORT": str(FIRST_PORT),
        "VLLM_NO_USAGE_STATS": "1",
    }


def names_in(tests: Path, file: str) -> set[str]:
    """The names of the hub that a file and what stands beside it may ask for."""
    path = tests / file
    parents = [parent for parent in path.parents if parent != tests and tests in parent.parents]
    beside = [parent / name for parent in parents for name in ("conftest.py", "utils.py", "util.py")]
    return {
        name for text in (path, *beside) if text.exists() for name in HUB_NAME.findall(text.read_text())
    }  # fmt: skip


def make_hub(home: Path, names: set[str]) -> None:
    """A cache of the hub in which every name is one of the suite's models."""
    long, encoder = home / "models" / "demo", home / "models" / "encoder"
    shutil.copytree(DEMO, long)
    lengthen(long / "config.json", "max_position_embeddings")
    lengthen(long / "tokenizer_config.json", "model_max_length")
    make_encoder(encoder)
    for name in names:
        source = encoder if ENCODERS.search(name) else long
        if name in PEOPLES_ADAPTERS:
            source = ADAPTERS / PEOPLES_ADAPTERS[name]
        folder = home / "hub" / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(REVISION)
        shutil.copytree(source, folder / "snapshots" / REVISION)


def lengthen(path: Path, key: str) -> None:
    """Write the suite's context under this key."""
    path.write_text(json.dumps({**json.loads(path.read_text()), key: CONTEXT}))


def make_encoder(folder: Path) -> None:
    """An encoder with random weights, of the size of multilingual-e5-small, with the demo model's tokenizer."""
    import torch  # not above: the shim does not need it, and would take seconds longer
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert", vocab_size=len(tokenizer), hidden_size=384, num_hidden_layers=2, num_attention_heads=12,
        intermediate_size=512, max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id,
        architectures=["BertModel"],
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)


def run_file(name: str, home: Path, environment: dict[str, str], options: argparse.Namespace) -> list[int]:
    """Run one file; returns its cases, passed, failed, errors, skipped."""
    report = home / "reports" / f"{name.replace('/', '.')}.xml"
    command = [options.python, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "-q"]
    command += ["--basetemp", str(home / "tmp" / "pytest"), f"--junitxml={report}", "-k", options.k]
    command += ["-o", "asyncio_mode=strict", "-W", "ignore", f"tests/{name}"]
    log = (options.logs or home) / f"{name.replace('/', '.')}.log"
    with log.open("w") as output:
        try:
            subprocess.run(
                command, cwd=home, env=environment, check=False, stdout=output, stderr=output, timeout=FILE_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: not done after {FILE_TIMEOUT_S} s", flush=True)
    if not report.exists():
        print(f"{name}: no report", flush=True)
        return [0, 0, 0, 1, 0]
    suite = next(ElementTree.parse(report).iter("testsuite"))
    cases, failed, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    for case in suite.iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        if problem is not None:
            said = " ".join((problem.get("message") or "").split())[:300]
            print(f"{name}::{case.get('name')} {problem.tag}: {said}", flush=True)
    counts = [cases, cases - failed - errors - skipped, failed, errors, skipped]
    print(f"{name}: passed {counts[1]} of {cases}, skipped {skipped}", flush=True)
    return counts


def shim(arguments: list[str]) -> int:
    """What `vllm` does: `vllm serve MODEL FLAGS` becomes this server."""
    if arguments[:1] != ["serve"]:
        print(f"vllm {' '.join(arguments[:1])} is not this server's", file=sys.stderr)
        return 2
    model, given = arguments[1], kept(arguments[2:])
    home = Path(os.environ[HOME])
    folder = home / "hub" / "hub" / f"models--{model.replace('/', '--')}" / "snapshots" / REVISION
    if TEMPLATE in given:
        place = given.index(TEMPLATE)
        folder = with_template(folder, given[place + 1])
        del given[place : place + 2]
    if folder.exists() and "--served-model-name" not in given:
        given += ["--served-model-name", model]
    if "--max-model-len" in given:
        place = given.index("--max-model-len") + 1
        given[place] = str(min(int(given[place]), LONGEST))
    else:
        given += ["--max-model-len", str(LONGEST)]
    data = tempfile.mkdtemp(prefix="data-", dir=home)
    command = [sys.executable, "-W", "ignore", "manage.py", "serve", str(folder if folder.exists() else model), *given]
    print("$", *command, flush=True)
    os.execve(sys.executable, command, settings(data, given[given.index("--port") + 1]))


def with_template(model: Path, template: str) -> Path:
    """A copy of the model with another chat template, given as a file or as text."""
    folder = Path(tempfile.mkdtemp(prefix="templated-", dir=os.environ[HOME])) / "model"
    shutil.copytree(model, folder)
    text = Path(template).read_text() if len(template) < 1000 and Path(template).exists() else template
    (folder / "chat_template.jinja").write_text(text)
    return folder


def kept(flags: list[str]) -> list[str]:
    """The flags without those that are dropped, written with hyphens."""
    kept, rest = [], flags
    while rest:
        name, equals, value = rest[0].partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in DROPPED:
            rest = rest[1 + (0 if equals else DROPPED[name]) :]
            continue
        kept.append(f"{name}={value}" if equals else name if name.startswith("--") else rest[0])
        rest = rest[1:]
    return kept


def settings(data: str, port: str) -> dict[str, str]:
    """The environment of the server: only the front plane, with the admin on its port, and its data in `data`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TMPDIR", "HF_HOME")}
    zero = (
        "GRPC_PORT", "DJL_PORT", "MINDIE_PORT", "MINDIE_MANAGEMENT_PORT", "MINDIE_METRICS_PORT",
        "TORCHSERVE_GRPC_INFERENCE_PORT", "TORCHSERVE_GRPC_MANAGEMENT_PORT",
    )  # fmt: skip
    named = {
        **dict.fromkeys(zero, "0"),
        "CONTROL_PORT": port,
        "DATA_DIR": data,
        "THREADS": "1",
        "SHOW_ADAPTER_PATHS": "true",
    }
    return {**environment, **{f"DRAGOMAN_{name}": value for name, value in named.items()}}


if __name__ == "__main__":
    sys.exit(main())

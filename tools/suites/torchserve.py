"""Runs TorchServe's own gRPC tests and client, unmodified, against this server.

    python -m tools.suites.torchserve CHECKOUT [arguments of pytest]

CHECKOUT is a working copy of github.com/pytorch/serve. Nothing is written into it: its tests are copied into a temporary
folder, where `torchserve` is this script, which starts `manage.py serve` with the demo model under the names that the tests
register. The tests need `orjson` and `requests`, and the ports 7070 and 7071 (of REST 8080 to 8082 too).

Two things differ from TorchServe, since this server has no models of images: archives are not made, and the pictures
that the tests send are replaced by a text. `--pictures` keeps them; they are then refused.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import grpc
import psutil

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
PROTOS = "frontend/server/src/main/resources/proto"
COPIED = ("test", "ts", "ts_scripts", PROTOS)
PICTURE = Path("examples", "image_classifier", "kitten.jpg")
DIGIT = Path("test", "pytest", "test_data", "0.png")
TEXTS = Path("examples", "text_classification", "sample_text.txt")
MODELS = ("densenet161", "mnist", "squeezenet1_1", "resnet-18", "resnet-152-batch", "echo_stream", "alexnet")
TESTS = (
    "test_gRPC_management_apis.py",
    "test_gRPC_model_control.py",
    "test_gRPC_allowed_urls.py",
    "test_gRPC_token_authorization.py",
)
CLIENT = (
    ("register", "densenet161"),
    ("infer", "densenet161", str(PICTURE)),
    ("infer_stream", "densenet161", str(PICTURE)),
    ("unregister", "densenet161"),
)
HOME = "TORCHSERVE_SUITE"
"""The environment variable with the temporary folder."""
START_S, STOP_S = 180, 60
# The maker of archives needs torch-model-archiver and downloads weights.
MARSGEN = '"""Makes no archives."""\nmar_set = set()\n\n\ndef gen_mar(model_store=None):\n    pass\n'
SHIM = '#!/bin/sh\ncd "{root}" && exec env SUITE_CWD="$OLDPWD" "{python}" -W ignore -m tools.suites.torchserve --shim "$@"\n'


def main() -> int:
    """Run the tests, then the client; returns the exit status."""
    if sys.argv[1:2] == ["--shim"]:
        return shim(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--pictures", action="store_true", help="send the pictures that the tests send")
    parser.add_argument("--no-client", action="store_true", help="do not run torchserve_grpc_client.py")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="arguments of pytest")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="torchserve-suite-") as folder:
        home = Path(folder)
        environment = prepare(home, options.checkout.resolve(), options.pictures)
        print(f"the pictures are {'sent as they are' if options.pictures else 'replaced by a text'}", flush=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "-v"]
        status = subprocess.run(
            [*command, *options.tests], cwd=home / "test" / "pytest", env=environment, check=False
        ).returncode
        if not options.no_client:
            status = run_client(home, environment) or status
    return status


def prepare(home: Path, checkout: Path, pictures: bool) -> dict[str, str]:
    """Fill the temporary folder; returns the environment of the tests."""
    for name in COPIED:
        shutil.copytree(checkout / name, home / name, symlinks=True)
    for name in (PICTURE, TEXTS):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, home / name)
    if not pictures:
        for name in (PICTURE, DIGIT):
            (home / name).write_text("Question: What is the capital of Spain?\nAnswer:")
    (home / "ts_scripts" / "marsgen.py").write_text(MARSGEN)
    (home / "ts" / "__init__.py").write_text("")  # the real one needs torch's extensions
    for name in MODELS:
        shutil.copytree(DEMO, home / "models" / name)
    stubs = home / "stubs"
    stubs.mkdir()
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", sysconfig.get_path("purelib"), "-I", str(home / PROTOS)]
    subprocess.run(
        [*protoc, f"--python_out={stubs}", f"--grpc_python_out={stubs}", "inference.proto", "management.proto"],
        check=True,
    )
    program = home / "bin" / "torchserve"
    program.parent.mkdir()
    program.write_text(SHIM.format(root=ROOT, python=sys.executable))
    program.chmod(0o755)
    for folder in ("tmp", "tmp/workspace", "tmp/workspace/model_store", "test/pytest/logs/config"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    path = [str(stubs), str(home), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        HOME: str(home),
        "TMPDIR": str(home / "tmp"),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run_client(home: Path, environment: dict[str, str]) -> int:
    """Register, infer, infer as a stream, unregister with TorchServe's client."""
    server = subprocess.Popen(
        ["torchserve", "--start", "--disable-token-auth", "--enable-model-api"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if "Model server started" in line:
                break
        for words in CLIENT:
            command = [sys.executable, str(home / "ts_scripts" / "torchserve_grpc_client.py"), *words]
            print("$ torchserve_grpc_client.py", *words, flush=True)
            status = subprocess.run(command, cwd=home, env=environment, check=False).returncode
            print(f"exit status {status}", flush=True)
            if status:
                return status
    finally:
        subprocess.run(["torchserve", "--stop"], env=environment, check=False)
        server.wait(STOP_S)
    return 0


def shim(arguments: list[str]) -> int:
    """What `torchserve` does."""
    parser = argparse.ArgumentParser()
    for name in (
        "--start",
        "--stop",
        "--foreground",
        "--no-config-snapshots",
        "--disable-token-auth",
        "--enable-model-api",
    ):
        parser.add_argument(name, action="store_true")
    for name in ("--model-store", "--ts-config", "--models", "--plugins-path"):
        parser.add_argument(name)
    options = parser.parse_args(arguments)
    home = Path(os.environ[HOME])
    record = home / "server.pid"
    if options.stop:
        stop(record)
        return 0
    given = properties(options.ts_config)
    with tempfile.TemporaryDirectory(prefix="data-", dir=home) as data, (home / "server.log").open("a") as log:
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "manage.py", "serve"],
            cwd=ROOT, env=settings(options, given, home, data), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        record.write_text(str(server.pid))
        try:
            for port in (7070, 7071):
                with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                    grpc.channel_ready_future(channel).result(timeout=START_S)
        except grpc.FutureTimeoutError:
            print((home / "server.log").read_text(), flush=True)
            server.kill()
            return 1
        print("Model server started.", flush=True)
        return server.wait()


def settings(options: argparse.Namespace, given: dict[str, str], home: Path, data: str) -> dict[str, str]:
    """The environment of the server, for TorchServe's options and properties."""
    tokens = "off" if disables_tokens(given, options.disable_token_auth) else "on"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TMPDIR")}
    zero = ("GRPC_PORT", "DJL_PORT", "MINDIE_PORT", "MINDIE_MANAGEMENT_PORT", "MINDIE_METRICS_PORT")
    named = {
        **dict.fromkeys(zero, "0"),
        "FRONT_PORT": "18000",
        "CONTROL_PORT": "18000",
        "DATA_DIR": data,
        "THREADS": "1",
        "TORCHSERVE_INFERENCE_PORT": "8080",
        "TORCHSERVE_MANAGEMENT_PORT": "8081",
        "TORCHSERVE_METRICS_PORT": "8082",
        "TORCHSERVE_MODEL_STORE": str(home / "models"),
        "TORCHSERVE_MODEL_API": str(options.enable_model_api or given.get("enable_model_api") == "true").lower(),
        "TORCHSERVE_TOKEN_AUTHORIZATION": tokens,
        "TORCHSERVE_KEY_FOLDER": os.environ.get("SUITE_CWD", "."),
    }
    if "token_expiration_min" in given:
        named["TORCHSERVE_TOKEN_EXPIRATION_MIN"] = given["token_expiration_min"]
    if "allowed_urls" in given:
        listed = ", ".join(f'"{url}"' for url in given["allowed_urls"].split(","))
        named["TORCHSERVE_ALLOWED_URLS"] = f"[{listed}]"
    return {**environment, **{f"DRAGOMAN_{name}": value for name, value in named.items()}}


def disables_tokens(given: dict[str, str], option: bool) -> bool:
    """Whether the environment says so, where it counts, or else the option or the properties."""
    name = "TS_DISABLE_TOKEN_AUTHORIZATION"
    if given.get("enable_envvars_config") == "true" and name in os.environ:
        return os.environ[name] == "true"
    return option or given.get("disable_token_authorization") == "true"


def properties(path: str | None) -> dict[str, str]:
    """The keys of a config.properties."""
    if path is None:
        return {}
    base = Path(os.environ.get("SUITE_CWD", "."), path)
    lines = [line.partition("=") for line in base.read_text().splitlines() if not line.startswith("#")]
    return {key.strip(): value.strip() for key, _, value in lines if value}


def stop(record: Path) -> None:
    """End the server, and wait for that."""
    if not record.exists():
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(record.read_text()))
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.1)
    record.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())

"""llama.cpp's server, compiled for this CPU from the sources that llama-cpp-python's package on PyPI contains."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path

from benchmarks.environments import CommandError, run, said
from benchmarks.peers.base import Launch, Setup

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SLOTS, CACHE_TOKENS = 32, 16384
# Run with -P: its folder has modules that are called like packages that it imports.
CONVERTER = Path(__file__).with_name("gguf_converter.py")
TYPES = {"bfloat16": "bf16", "float32": "f32"}
BYTES = "q8_0"
CMAKE = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
]  # fmt: skip


class LlamaCpp:
    """`llama-server` with as many slots as it has streams, up to 32, and one cache for all."""

    name = "llama.cpp"

    def install(self, cache: Path, log: Path) -> dict[str, str]:
        program = _program(cache)
        if not program.exists():
            if shutil.which("cmake") is None:
                raise CommandError("cmake and a C++ compiler are needed to build llama.cpp")
            build = ["cmake", "--build", str(program.parent.parent), "--target", program.name, "--parallel"]
            run(["cmake", "-S", str(_sources(cache, log)), "-B", str(program.parent.parent), *CMAKE], log)
            run([*build, str(os.cpu_count())], log)
        return {PACKAGE: VERSION, self.name: "; ".join(said([str(program), "--version"]).splitlines())}

    def launch(self, setup: Setup, log: Path) -> Launch:
        kind = TYPES[setup.dtype] if setup.quantization == "none" else BYTES
        model = setup.cache / "gguf" / f"{setup.name}-{kind}.gguf"
        if not model.exists():
            model.parent.mkdir(exist_ok=True)
            unfinished = model.with_suffix(".unfinished")
            converter = [sys.executable, "-P", str(CONVERTER), str(_sources(setup.cache, log)), str(setup.model)]
            run([*converter, kind, str(unfinished)], log)
            unfinished.rename(model)
        threads = str(setup.threads)
        command = [
            str(_program(setup.cache)), "-m", str(model), "--alias", setup.name, "--host", "127.0.0.1",
            "--port", str(setup.port), "-t", threads, "-tb", threads, "-np", str(SLOTS),
            "-c", str(CACHE_TOKENS), "--kv-unified",
        ]  # fmt: skip
        return Launch(command, model=setup.name)


def _program(cache: Path) -> Path:
    return cache / "llama.cpp" / "build" / "bin" / "llama-server"


def _sources(cache: Path, log: Path) -> Path:
    """llama.cpp's tree; unpacked if it is not there."""
    folder = cache / "llama.cpp"
    name = f"{PACKAGE.replace('-', '_')}-{VERSION}"
    tree = folder / name / "vendor" / "llama.cpp"
    if not tree.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = ["--no-deps", "--no-binary", PACKAGE, "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
        run([sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *source], log)
        unfinished = folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with tarfile.open(folder / f"{name}.tar.gz") as archive:
                archive.extractall(unfinished, filter="data")
        except tarfile.TarError as error:
            raise CommandError(f"{name}.tar.gz cannot be unpacked: {error}") from error
        (unfinished / name).rename(folder / name)
    return tree

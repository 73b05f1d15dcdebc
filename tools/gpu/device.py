"""Which device there is, and whether the campaign can use it. It asks in a process of its own, so that the campaign
holds no memory of the device, and one that is gone is seen as gone.

    python -m tools.gpu.device        prints the device as JSON
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

LEAST_CAPABILITY = (8, 0)
"""The oldest that multiplies bfloat16 in its matrix units (Ampere)."""
DRY = "no device (dry run)"
TIMEOUT_S = 60


class Device(msgspec.Struct, frozen=True):
    """A device: its name, compute capability, bytes of memory, and the versions that reach it."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    torch: str
    cuda: str
    triton: str
    transformers: str


class Unusable(Exception):
    """There is no device, or none that the campaign can use; the text is for the terminal."""


def look() -> Device:
    """Raises Unusable for no device, for one that does not answer, and for one that is too old."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu.device"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unusable(f"the device did not answer within {TIMEOUT_S} s") from None
    if done.returncode:
        raise Unusable((done.stderr.decode(errors="replace").strip().splitlines() or ["no answer"])[-1])
    device = msgspec.json.decode(done.stdout.splitlines()[-1], type=Device)
    check(device)
    return device


def check(device: Device) -> None:
    """Raises Unusable for one that is too old."""
    if device.capability < LEAST_CAPABILITY:
        raise Unusable(
            f"{device.name} has compute capability {version(device.capability)}; {version(LEAST_CAPABILITY)} is the least"
        )


def version(capability: tuple[int, int]) -> str:
    """Of a compute capability, as it is written: 8.0."""
    return f"{capability[0]}.{capability[1]}"


def main() -> None:
    """Print the first device, or say that torch finds none."""
    import torch
    import transformers
    import triton

    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here")
    free, total = torch.cuda.mem_get_info(0)
    device = Device(
        name=torch.cuda.get_device_name(0),
        capability=torch.cuda.get_device_capability(0),
        total=total,
        free=free,
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        triton=triton.__version__,
        transformers=transformers.__version__,
    )
    print(msgspec.json.encode(device).decode())


if __name__ == "__main__":
    main()

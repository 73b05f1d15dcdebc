"""The suite: streaming users of the OpenAI and the TGI dialect, compared with loadtests/targets.toml.

locust -f loadtests/locustfile.py --headless -H http://127.0.0.1:8000 -u 8 -r 8 -t 30s
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from locust import events

from loadtests.settings import SETTINGS
from loadtests.stream import SAMPLES
from loadtests.thresholds import broken_targets, figures
from loadtests.users.openai import OpenAIStreamUser
from loadtests.users.tgi import TGIStreamUser

__all__ = ["OpenAIStreamUser", "TGIStreamUser"]


@events.quitting.add_listener
def judge(environment: Any, **_: Any) -> None:
    """Print the figures, compare them with the targets, and set the exit status."""
    measured = figures(SAMPLES)
    print(f"\n{SAMPLES.requests} streams, {SAMPLES.failures} failed, {SAMPLES.output_tokens} output tokens")
    for name, value in measured.items():
        print(f"  {name.removeprefix('min_'):<22} {value:10.2f}")
    broken = broken_targets(Path(SETTINGS.targets), measured)
    for line in broken:
        print(f"MISSED {line}")
    environment.process_exit_code = 1 if broken else 0

"""What a web process imports before its first request: nothing that only workers, downloads or optional exports need."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT

# As `web` does, up to the server itself.
PROGRAM = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
import django
django.setup(set_prefix=False)
import config.control, config.listeners, config.server, config.urls
from config.options import get_options
from inference import dialects
for dialect in dialects.declared_dialects():
    dialect.set_up(get_options())
assert "inference.dialects.openai.dialect" in sys.modules
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
NEVER = {"huggingface_hub", "torch", "transformers", "numba", "opentelemetry", "locust", "boto3"}


def test_a_web_process_imports_nothing_for_downloads_workers_and_exports(tmp_path):
    environment = {**os.environ, "DRAGOMAN_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"django", "twisted", "tokenizers"} <= imported
    assert not NEVER & imported

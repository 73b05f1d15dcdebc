"""What a worker is started with, and what is left of one that could not be started."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from pydantic import ValidationError

from config.options import Options
from engine.address import parse
from engine.config import EngineConfig
from management.launchers import LAUNCHERS, environment, local
from management.launchers.environment import worker_environment
from management.launchers.network import THIS_HOST
from management.models import Worker

GIVEN = {
    "PATH": "/bin", "HOME": "/home/me", "LC_ALL": "C", "LD_LIBRARY_PATH": "/lib", "XDG_CACHE_HOME": "/cache",
    "PYTHONPATH": "/lib/python", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all",
    "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1", "TMPDIR": "/tmp", "https_proxy": "http://proxy",
    "NO_PROXY": "localhost", "PYTORCH_CUDA_ALLOC_CONF": "x", "NUMBA_CACHE_DIR": "/numba",
}  # fmt: skip
KEPT_BACK = {
    "DRAGOMAN_DATABASE_URL": "postgresql://u:p@h/d", "DRAGOMAN_REDIS_URL": "redis://:p@h/0", "DATABASE_URL": "x", "PGPASSWORD": "x", "SECRET_KEY": "x",
    "DJANGO_SECRET_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "OPENAI_API_KEY": "x", "MIES_CONFIG_JSON_PATH": "x",
    "GITHUB_TOKEN": "x", "SSH_AUTH_SOCK": "x", "ftp_proxy": "x", "path": "x",
}  # fmt: skip


def test_a_worker_knows_what_libraries_need_and_no_secrets():
    assert worker_environment(GIVEN | KEPT_BACK) == GIVEN


def test_a_full_disk_leaves_memory_for_temporary_files(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(environment.tempfile, "TemporaryFile", refuse)
    assert worker_environment({"PATH": "/bin", "TMPDIR": "/full"})["TMPDIR"] == environment.MEMORY


def test_a_worker_that_ends_before_it_was_told_anything_leaves_no_process(monkeypatch):
    started = []

    class Deaf(subprocess.Popen):
        """Closes its pipe at once."""

        def __init__(self, _: object, **options: object) -> None:
            super().__init__([sys.executable, "-c", "import os; os.close(0)"], **options)
            started.append(self)
            self.wait()

    monkeypatch.setattr(local.subprocess, "Popen", Deaf)
    launcher = local.LocalLauncher()
    with pytest.raises(BrokenPipeError):
        launcher.launch(EngineConfig(model="x" * (1 << 17)))
    launcher.close()
    assert not psutil.pid_exists(started[0].pid)
    for pipe in (started[0].stdin, started[0].stdout):
        assert pipe.closed


def test_a_launcher_is_chosen_by_name(monkeypatch):
    monkeypatch.setenv("DRAGOMAN_LAUNCHER", "local")
    launcher = LAUNCHERS[Options().launcher](None, THIS_HOST)
    assert isinstance(launcher, local.LocalLauncher)
    assert parse(launcher.address("1-0-1")).path.endswith("/1-0-1.sock")
    launcher.close()
    monkeypatch.setenv("DRAGOMAN_LAUNCHER", "nowhere")
    with pytest.raises(ValidationError, match="no such launcher; known: local"):
        Options()


@pytest.mark.django_db(transaction=True)
def test_paths_of_sockets_become_addresses():
    executor = MigrationExecutor(connection)
    before = executor.migrate([("management", "0003_manage_scope")]).apps
    model = before.get_model("management", "Model").objects.create(name="m")
    version = before.get_model("management", "ModelVersion").objects.create(model=model, number=1, source="/m")
    deployment = before.get_model("management", "Deployment").objects.create(name="d", version=version)
    before.get_model("management", "Worker").objects.create(
        deployment=deployment, version=version, index=0, epoch=1, socket="/tmp/w.sock"
    )
    newest = MigrationExecutor(connection)
    newest.migrate(newest.loader.graph.leaf_nodes("management"))
    assert Worker.objects.get().address == "unix:/tmp/w.sock"

"""Folders of KV blocks: each deployment has its own, and it goes when the deployment does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from management.offload_folders import GRACE_S, offload_folder, sweep_offload_folders
from management.reconcile import Reconciler
from management.services.deployments import start_deployment
from management.snapshot import SnapshotHolder


@pytest.fixture
def root(settings, tmp_path):
    settings.KV_OFFLOAD = tmp_path / "kv-offload"
    return settings.KV_OFFLOAD


def test_workers_get_the_folder_of_their_deployment(deployment, launcher, root, tmp_path):
    start_deployment(deployment, "tester", replicas=2)
    made = Reconciler(launcher, SnapshotHolder(), str(tmp_path))
    made.reconcile_once()
    assert {worker.config.kv_offload_dir for worker in launcher.workers} == {str(root / str(deployment.pk))}


def test_without_a_data_folder_there_is_none(deployment, launcher, reconciler):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert launcher.workers[0].config.kv_offload_dir == ""


def test_the_folders_of_deleted_deployments_are_removed(root):
    assert sweep_offload_folders({1}) is None  # there is no folder at all
    for name in ("1", "2", "3", "notes"):
        (root / name / "a" / "b").mkdir(parents=True)
        (root / name / "a" / "b" / "block").write_text("x")
    for name in ("1", "2", "notes"):
        os.utime(root / name, (0, time.time() - GRACE_S - 60))
    sweep_offload_folders({1}).join()
    assert sorted(path.name for path in root.iterdir()) == ["1", "3", "notes"]  # the third may be new
    assert Path(offload_folder(3)) == root / "3"

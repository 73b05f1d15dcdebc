"""Which blocks on disk are of one model, and which options the KV offload refuses."""

from __future__ import annotations

import shutil
import threading

import pytest

from engine.config import EngineConfig
from engine.cpu.kernels import ops
from engine.cpu.kernels.emit import UNPAIRED
from engine.devices import backend_for
from engine.kv_transfer.blocks import CacheBlocks
from engine.models import prepared
from engine.offload.identity import MEMO_PREFIX, identity_of, model_digest
from tests.conftest import DEMO
from tests.engine.engines import core
from tests.engine.offloading import SMALL
from tests.models.random_models import make_model

pytestmark = pytest.mark.full


def test_without_it_nothing_is_noted():
    before = set(threading.enumerate())
    engine = core(DEMO, **SMALL)
    assert engine.offload is None
    assert engine.scheduler.pool.filled is None
    assert engine.refresh_stats().offload is None
    assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("offload")]


def test_other_models_types_and_sizes_share_nothing(models_dir, tmp_path):
    model = make_model(models_dir, "llama")
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    folder = tmp_path / "kv"
    folder.mkdir()

    def identity(directory, **options) -> bytes:
        config = EngineConfig(model=str(directory), max_model_len=64, max_num_seqs=1, **{"dtype": "float32", **options})
        return identity_of(config, prepared.prepare(config, backend_for(config)), folder)

    first = identity(model)
    assert identity(copy) == first  # the content counts, not the place
    others = [identity(model, dtype="bfloat16"), identity(model, block_size=32)]
    config = copy / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    others.append(identity(copy))
    assert len({first, *others}) == 4


def test_another_order_of_numbers_in_memory_shares_nothing(models_dir, tmp_path, monkeypatch):
    config = EngineConfig(
        model=str(make_model(models_dir, "llama")), dtype="bfloat16", max_model_len=64, max_num_seqs=1
    )

    def digests() -> tuple[bytes, str]:
        made = prepared.prepare(config, backend_for(config))
        return identity_of(config, made, tmp_path), CacheBlocks(made.cache).layout

    identity, layout = digests()
    monkeypatch.setattr(ops, "pairing", lambda: UNPAIRED)
    other_identity, other_layout = digests()
    assert identity != other_identity
    assert layout != other_layout


def test_the_models_digest_is_remembered(models_dir, tmp_path, monkeypatch):
    model = make_model(models_dir, "llama")
    digest = model_digest(model, tmp_path)
    assert len(list(tmp_path.glob(f"{MEMO_PREFIX}*"))) == 1
    monkeypatch.setattr("hashlib.file_digest", None)
    assert model_digest(model, tmp_path) == digest


@pytest.mark.parametrize(
    "options",
    [
        {"kv_offload_disk_bytes": -1},
        {"kv_offload_memory_bytes": 1, "prefix_caching": False},
        {"kv_offload_disk_bytes": 1, "tensor_parallel_size": 2},
    ],
)
def test_what_cannot_be_is_refused_by_name(options):
    with pytest.raises(ValueError, match="kv_offload_"):
        EngineConfig(model="x", **options)

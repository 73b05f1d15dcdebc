"""The KV offload on a device's backend: blocks go to host memory and to disk, and come back as they were."""

from __future__ import annotations

import torch

from engine.gates import offload as gate
from engine.offload.blocks import BlockCopier
from engine.offload.memory import MemoryTier
from tests.engine.engines import Driver, prompts
from tests.gpu.test_engine import engine
from tests.models.random_models import make_model

FIRST, OTHER = prompts(400, (100, 110), seed=2)


def test_an_evicted_prefix_comes_back_from_memory_and_then_from_disk(models_dir, tmp_path, device, monkeypatch):
    for name in ("LEAST_WAIT_S", "MOST_WAIT_S", "FIRST_WAIT_S"):
        monkeypatch.setattr(gate, name, 60.0)
    tiers = {
        "kv_offload_memory_bytes": 1 << 22,
        "kv_offload_disk_bytes": 1 << 22,
        "kv_offload_dir": str(tmp_path / "kv"),
    }
    made = engine(make_model(models_dir, "llama"), device, max_num_seqs=1, **tiers)
    driver = Driver(made)
    for number, prompt in enumerate((FIRST, OTHER, FIRST, OTHER, FIRST)):
        driver.submit(number, prompt, max_tokens=4, ignore_eos=True)
        driver.run()
        made.offload._disk.flush()
        if number == 3:
            made.offload._memory._row_of.clear()
    assert driver.tokens(4) == driver.tokens(2) == driver.tokens(0)
    assert driver.tokens(3) == driver.tokens(1)
    assert [driver.outputs[number][0].cached_tokens for number in range(5)] == [0, 0, 96, 96, 96]
    stats = made.refresh_stats().offload
    assert stats.memory.hits > 6
    assert 0 < stats.disk.hits <= 6
    made.close()


def test_blocks_of_any_shape_are_copied_bit_for_bit(device):
    class Cache:
        keys = [torch.randn(6, 2, 5, 16).to(device), torch.randn(6, 3, 7).half().to(device)]
        values = [torch.randn(6, 4).bfloat16().to(device), torch.randn(6, 16, 1).to(device)]

    before = [tensor.clone() for tensor in (*Cache.keys, *Cache.values)]
    copier = BlockCopier(Cache)
    copier.blocks_at_once = 2
    assert copier.block_bytes == 2 * 5 * 16 * 4 + 3 * 7 * 2 + 4 * 2 + 16 * 4
    rows = copier.to_host(copier.read([4, 1, 3]))
    for tensor in (*Cache.keys, *Cache.values):
        tensor.zero_()
    copier.write([4, 1, 3], [torch.frombuffer(bytearray(rows.content(n)), dtype=torch.uint8) for n in range(3)])
    for tensor, was in zip((*Cache.keys, *Cache.values), before, strict=True):
        assert torch.equal(tensor[[4, 1, 3]], was[[4, 1, 3]])
        assert not tensor[[0, 2, 5]].any()


def test_memory_keeps_what_was_used_last(device):
    tier = MemoryTier(3 * 64 + 1, 64, device)
    rows = torch.arange(5 * 64, dtype=torch.int64).to(torch.uint8).reshape(5, 64)
    names = [bytes([n]) for n in range(5)]
    tier.store(names[:3], rows[:3].to(device))
    tier.touch([names[0]])
    tier.store(names[2:], rows[2:].to(device))
    assert [name in tier for name in names] == [True, False, False, True, True]
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(tier.get(names[0]), rows[0])
    assert torch.equal(tier.get(names[4]), rows[4])
    assert (tier.total_bytes, tier.evictions, tier.stored) == (3 * 64, 2, 5)
    nothing = MemoryTier(63, 64, device)
    nothing.store(names[:1], rows[:1].to(device))
    assert names[0] not in nothing

"""Prefix blocks that were evicted, or that an earlier worker computed, come back from disk: the same bits and the same tokens."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine import faults
from engine.gates import offload as gate
from engine.messages import AdapterRef, Submit
from engine.models import prepared
from engine.models.files import ModelError
from engine.models.loader import load_model
from engine.offload import disk
from engine.offload.block_file import HEADER_BYTES
from engine.sampling.params import SamplingParams
from tests.conftest import DEMO
from tests.engine.engines import Driver, core, prompts
from tests.engine.few_blocks import few_blocks, forget_cached
from tests.engine.offloading import CACHED, FIRST, OTHER, SMALL, ask, cached, content, files, stats
from tests.engine.test_adapters import make_adapter
from tests.models.random_models import make_model
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """However busy the machine is, blocks come before anybody gives up on them."""
    for name in ("LEAST_WAIT_S", "MOST_WAIT_S", "FIRST_WAIT_S"):
        monkeypatch.setattr(gate, name, 60.0)
    monkeypatch.setattr(disk, "FIRST_SCAN_S", 60.0)
    monkeypatch.setattr(disk, "FLUSH_S", 60.0)


@pytest.fixture
def arm():
    """Arm faults, which no later test meets."""
    yield lambda text: faults.arm({faults.VARIABLE: text, faults.SWITCH: "1"})
    faults.arm({})


@pytest.fixture(scope="module")
def loaded():
    """The models of this module by directory: each is loaded and verified once."""
    return {}


@pytest.fixture
def start(tmp_path, loaded, monkeypatch):
    """Starts engines on one folder, and ends them."""
    engines = []

    def load(config, backend):
        if config.model not in loaded:
            loaded[config.model] = load_model(config, backend)
        return loaded[config.model]

    monkeypatch.setattr(prepared, "load_model", load)

    def started(model=DEMO, folder="kv", **options) -> Driver:
        options = {**SMALL, "kv_offload_disk_bytes": 1 << 30, "kv_offload_dir": str(tmp_path / folder), **options}
        engines.append(core(model, **options))
        return Driver(engines[-1])

    yield started
    for engine in engines:
        engine.close()


def test_an_evicted_prefix_comes_back_bit_for_bit(start):
    driver = start()
    tokens = ask(driver, 0)
    computed = content(driver)
    ask(driver, 1, OTHER)
    assert ask(driver, 2) == tokens
    assert [cached(driver, number) for number in range(3)] == [0, 0, CACHED]
    assert torch.equal(content(driver), computed)
    assert computed.any(dim=1).all()
    assert driver.engine.refresh_stats().prefix_hits == CACHED
    assert stats(driver).disk.hits == CACHED // 16


def test_a_restarted_worker_finds_it(start, tmp_path):
    first = start()
    tokens = ask(first, 0)
    first.engine.close()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))
    again = start()
    assert stats(again).disk.bytes == sum(path.stat().st_size for path in files(tmp_path))
    assert ask(again, 0) == tokens
    assert cached(again, 0) == CACHED
    assert stats(again).disk.stored == 0  # it is there already


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral"])
def test_layers_of_any_shape_come_back(family, models_dir, start):
    model, (prompt, other) = make_model(models_dir, family), prompts(400, (100, 111), seed=2)
    driver = start(model, max_model_len=128)
    tokens = ask(driver, 0, prompt)
    ask(driver, 1, other)
    assert ask(driver, 2, prompt) == tokens
    assert [cached(driver, number) for number in range(3)] == [0, 0, 96]


def test_seeds_and_log_probabilities_are_the_same(start):
    asked = {"temperature": 0.9, "seed": 7, "logprobs": 2}
    driver = start()
    ask(driver, 0, **asked)
    ask(driver, 1, OTHER)
    ask(driver, 2, **asked)
    assert cached(driver, 2) == CACHED
    both = [[(t, o.logprobs) for o in driver.outputs[n] for t in o.token_ids] for n in (0, 2)]
    assert both[0] == both[1]


def test_adapters_and_salts_share_nothing(models_dir, tmp_path, start):
    model = make_model(models_dir, "llama")
    adapter = make_adapter(model, tmp_path, "a", target_modules="all-linear")
    driver = start(model, max_model_len=128)
    (prompt,) = prompts(400, (100,))

    def cached_of(number: int, adapter: AdapterRef | None, salt: str) -> int | None:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        driver.engine.submit(1, Submit(number, prompt, params, adapter=adapter, cache_salt=salt))
        driver.run()
        return cached(driver, number)

    asked = [(None, ""), (adapter, ""), (None, "a"), (adapter, "a")]
    assert [cached_of(number, *one) for number, one in enumerate(asked)] == [0, 0, 0, 0]
    driver.engine.close()
    driver = start(model, max_model_len=128)
    assert [cached_of(number, *one) for number, one in enumerate(asked)] == [96] * 4
    assert cached_of(9, None, "b") == 0


def test_prompt_log_probabilities_read_nothing(start):
    driver = start()
    ask(driver, 0)
    ask(driver, 1, OTHER)
    ask(driver, 2, prompt_logprobs=0)
    assert cached(driver, 2) == 0


def test_a_preempted_sequence_goes_on_with_what_it_computed(start):
    """Three sequences, and blocks for less than two of them."""
    asked = prompts(1700, (100, 110, 90), seed=8)
    driver = start(max_num_seqs=3, max_model_len=256)
    alone = start(max_num_seqs=3, max_model_len=256, folder="alone")
    expected = [ask(alone, i, prompt, max_tokens=100) for i, prompt in enumerate(asked)]
    pool = driver.engine.scheduler.pool
    with few_blocks(pool, 20):
        for i, prompt in enumerate(asked):
            driver.submit(i, prompt, max_tokens=100, ignore_eos=True)
        while not driver.engine.scheduler.num_preemptions:
            driver.step()
        driver.engine.offload._disk.flush()
        forget_cached(pool)  # the others need all that it gave back
        while driver.engine.has_work:
            driver.step()
        assert stats(driver).disk.hits > 0
        assert [driver.tokens(i) for i in range(3)] == expected
    driver.engine.check_integrity()


def damage(path):
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 100] ^= 1
    path.write_bytes(data)


def test_damaged_files_are_never_served(start, tmp_path):
    driver = start()
    tokens = ask(driver, 0)
    for path in files(tmp_path):
        damage(path)
    ask(driver, 1, OTHER)
    assert ask(driver, 2) == tokens
    assert (cached(driver, 2), stats(driver).disk.hits) == (0, 0)
    assert stats(driver).damaged
    # What was computed again has been written again.
    again = start()
    assert ask(again, 0) == tokens
    assert cached(again, 0) >= 16


def test_what_comes_before_the_damage_is_used(start, tmp_path):
    driver = start()
    tokens = ask(driver, 0)
    pool = driver.engine.scheduler.pool
    fifth = next(digest for digest, block in pool._block_of.items() if block == 5)
    damage(driver.engine.offload._disk.folder._path(fifth))
    ask(driver, 1, OTHER)
    assert ask(driver, 2) == tokens
    assert cached(driver, 2) == 64
    assert stats(driver).damaged == 1


def test_a_file_that_is_truncated_while_it_is_read(start, monkeypatch, tmp_path):
    driver = start()
    tokens = ask(driver, 0)
    ask(driver, 1, OTHER)

    def truncate(point: str) -> None:
        if point == "offload.read":
            for path in files(tmp_path):
                os.truncate(path, HEADER_BYTES + 100)

    monkeypatch.setattr(faults, "armed", {"offload.read": []})
    monkeypatch.setattr(faults, "hit", lambda point, *_: truncate(point))
    driver.submit(2, FIRST, ignore_eos=True)
    driver.run()
    assert driver.tokens(2) == tokens
    assert stats(driver).damaged


def test_a_slow_disk_delays_nobody_else_and_its_request_only_as_long_as_computing(start, arm, monkeypatch):
    for name in ("LEAST_WAIT_S", "MOST_WAIT_S", "FIRST_WAIT_S"):
        monkeypatch.setattr(gate, name, 1.0)
    driver = start(max_num_seqs=2)
    tokens = ask(driver, 0)
    ask(driver, 1, OTHER)
    ask(driver, 2, OTHER[::-1])
    arm("offload.read:sleep:3:1")
    driver.submit(3, FIRST, ignore_eos=True)
    driver.submit(4, OTHER[:20], ignore_eos=True, max_tokens=4)
    while not driver.outputs[4]:
        driver.step()
    assert not driver.outputs[3]
    driver.run()
    assert driver.tokens(3) == tokens
    assert cached(driver, 3) < CACHED
    assert stats(driver).late == 1


def test_a_prefix_that_comes_back_keeps_the_blocks_before_it(start):
    """Another request takes blocks while they are read."""
    driver = start(max_num_seqs=2, speculative_tokens=0)
    tokens = ask(driver, 0)
    ask(driver, 1, OTHER)
    ask(driver, 2, OTHER[::-1])
    pool = driver.engine.scheduler.pool
    assert driver.submit(3, OTHER[:20], max_tokens=200, ignore_eos=True) is None
    driver.step()
    assert driver.submit(4, FIRST, ignore_eos=True) is None
    (waiting,) = driver.engine.scheduler.waiting
    (head,) = pool.match(waiting.block_hashes)
    assert list(pool._free).index(head) < 4, "it would be evicted soon"
    driver.step()
    assert list(pool._free).index(head) == len(pool._free) - 1
    driver.run()
    assert driver.tokens(4) == tokens
    assert cached(driver, 4) == CACHED


def test_a_long_prefix_comes_back_in_parts_beside_others(start):
    driver = start(max_num_seqs=2, speculative_tokens=0)
    tokens = ask(driver, 0)
    ask(driver, 1, OTHER)
    ask(driver, 2, OTHER[::-1])
    driver.engine.offload._copier.blocks_at_once = 2
    assert driver.submit(3, OTHER[:20], max_tokens=200, ignore_eos=True) is None
    driver.step()
    assert driver.submit(4, FIRST, ignore_eos=True) is None
    driver.step()  # asks for the blocks
    staged = list(driver.engine.offload._staged.values())
    wait_until(lambda: all(each.done for each in staged))
    came = [stats(driver).disk.hits]
    while driver.engine.has_work:
        driver.step()
        came.append(stats(driver).disk.hits)
    assert came[-1] - came[0] == len(staged) > 4
    assert max(later - earlier for earlier, later in pairwise(came)) <= 2
    assert driver.tokens(4) == tokens
    assert cached(driver, 4) == CACHED


@pytest.mark.parametrize("seed", range(2))
def test_random_work_gives_the_tokens_that_it_gives_without(seed, start, arm):
    """Few prefixes, many ends, some that are aborted, a cache for hardly two of them, and files that are damaged or lost meanwhile."""
    rng = random.Random(seed)
    prefixes = prompts(1700, (150, 90, 120), seed=seed)
    asked = [(rng.choice(prefixes)[: rng.randrange(20, 150)], [rng.randrange(3, 1700)] * 3) for _ in range(30)]
    plain = Driver(core(DEMO, max_model_len=256, max_num_seqs=4))
    driver = start(max_num_seqs=4)
    with few_blocks(driver.engine.scheduler.pool, 24):
        for number, (prefix, end) in enumerate(asked):
            for each in (plain, driver):
                assert each.submit(number, prefix + end, max_tokens=12, ignore_eos=True) is None
            for _ in range(rng.randrange(12)):
                driver.step()
            if number % 7 == 3:
                driver.engine.abort(1, [number])
            if number == 15:
                arm("offload.read:errno:EIO:5-9")
            found = files(Path(driver.engine.config.kv_offload_dir).parent)
            if found and number % 5 == 0:
                with suppress(FileNotFoundError):  # one that was damaged before, and is removed now
                    damage(rng.choice(found))
        plain.run()
        while driver.engine.has_work:
            driver.step()
    driver.engine.check_integrity()
    for number in range(len(asked)):
        told = driver.tokens(number)
        assert told == plain.tokens(number)[: len(told)]
        assert len(told) == 12 or driver.finish_reason(number) == "abort"
    assert stats(driver).disk.hits > 0


def test_an_aborted_request_leaves_nothing(start, arm):
    driver = start()
    ask(driver, 0)
    ask(driver, 1, OTHER)
    arm("offload.read:sleep:0.2:1")
    driver.submit(2, FIRST)
    driver.step()
    driver.engine.abort(1, [2])
    driver.run()
    assert driver.finish_reason(2) == "abort"
    wait_until(lambda: not driver.engine.offload._staged)


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EIO"])
def test_a_disk_that_takes_nothing_costs_no_request(error, start, arm, tmp_path, monkeypatch):
    arm(f"offload.write:errno:{error}")
    driver = start()
    tokens = ask(driver, 0)
    assert files(tmp_path) == []
    ask(driver, 1, OTHER)
    assert ask(driver, 2) == tokens
    found = stats(driver)
    assert (found.failures, found.disk.stored, cached(driver, 2)) == (1, 0, 0)  # it is not tried again at once
    assert found.dropped > 0
    arm("")
    driver.engine.offload._disk._retry_at = 0.0
    ask(driver, 3, FIRST[::-1])
    assert stats(driver).disk.stored > 0


def test_a_disk_that_gives_nothing_costs_no_request(start, arm):
    driver = start()
    tokens = ask(driver, 0)
    ask(driver, 1, OTHER)
    arm("offload.read:errno:EIO")
    assert ask(driver, 2) == tokens
    assert cached(driver, 2) == 0


def test_workers_of_one_folder_use_each_others_blocks(start, monkeypatch):
    monkeypatch.setattr(disk, "RESCAN_S", 0.05)
    one, two = start(), start()
    tokens = ask(one, 0)
    folder = two.engine.offload._disk.folder
    wait_until(lambda: folder.total_bytes == stats(one).disk.bytes)
    assert ask(two, 0) == tokens
    assert cached(two, 0) == CACHED
    assert stats(two).disk.stored == 0


def test_a_folder_that_is_removed_is_made_again(start, tmp_path):
    driver = start()
    tokens = ask(driver, 0)
    shutil.rmtree(tmp_path / "kv")
    ask(driver, 1, OTHER)
    assert ask(driver, 2) == tokens
    assert cached(driver, 2) == 0
    assert files(tmp_path)
    ask(driver, 3, OTHER)
    assert ask(driver, 4) == tokens
    assert cached(driver, 4) == CACHED


def test_a_folder_that_cannot_be_used_costs_no_worker(start, tmp_path, caplog):
    (tmp_path / "kv").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for folder in ("kv", "file"):
        driver = start(folder=folder)
        assert driver.engine.offload is None
        driver.submit(0, FIRST)
        driver.run()
        assert driver.tokens(0)
    assert caplog.text.count("no KV blocks are kept on disk") == 2


def test_memory_beside_memory_is_refused(start):
    with pytest.raises(ModelError, match="kv_offload_memory_bytes is for CUDA devices"):
        start(kv_offload_memory_bytes=1 << 30, device="cpu")

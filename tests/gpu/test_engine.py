"""The engine on a device's backend: the same text as transformers, adapters included, and the same distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.batch import ForwardBatch, SequenceSlice
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.gpu import paged_attention, products
from engine.gpu.backend import DeviceBackend
from engine.gpu.graphs import DecodeGraphs, capture_sizes
from engine.gpu.lora import SlotLinear
from engine.gpu.sampling import choose
from engine.quantization.base import method
from engine.quantization.int8 import DeviceByteLinear
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from tests.engine.engines import Driver, Reference, prompts
from tests.engine.test_adapters import make_adapter
from tests.engine.test_sampling import request
from tests.gpu.marks import slow
from tests.models.random_models import make_model

OPTIONS = {
    "llama": {"target_modules": "all-linear"},
    "gpt2": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
}


def engine(model, device: torch.device, **options: object) -> EngineCore:
    config = EngineConfig(model=str(model), dtype="float32", kv_cache_bytes=1 << 24, max_model_len=128, **options)
    return EngineCore(config, DeviceBackend(config, device, method(config.quantization)))


@pytest.mark.parametrize("family", ["llama", slow("qwen3"), slow("gemma2"), slow("gpt2"), slow("gpt_oss"), "mixtral"])
def test_family_equals_generate(family, models_dir, device):
    model = make_model(models_dir, family)
    driver = Driver(engine(model, device, max_num_batched_tokens=17, max_num_seqs=4))
    asked = prompts(400, (30, 5, 41, 9))
    for i, prompt in enumerate(asked):
        assert driver.submit(i, prompt, max_tokens=12, ignore_eos=True) is None
        driver.step()
    driver.run()
    reference = Reference(model)
    for i, prompt in enumerate(asked):
        reference.assert_equal(prompt, driver.tokens(i))


def test_products_of_few_rows_equal_generate(models_dir, tmp_path, device, monkeypatch):
    """As on devices that gain by them; prompts of more and of fewer rows, and an adapter."""
    monkeypatch.setattr(products, "pays", lambda weight: True)
    calls = Counter()
    monkeypatch.setattr(products, "product", counted(products.product, calls))
    model = make_model(models_dir, "qwen2")
    driver, asked = Driver(engine(model, device, max_num_batched_tokens=96)), prompts(400, (90, 5, 30), seed=8)
    adapter = make_adapter(model, tmp_path, "a", r=4, **OPTIONS["llama"])
    for i, prompt in enumerate(asked):
        assert driver.submit(i, prompt, adapter if i == 1 else None, max_tokens=8, ignore_eos=True) is None
    driver.run()
    for i, prompt in enumerate(asked):
        Reference(model, Path(adapter.directory) if i == 1 else None).assert_equal(prompt, driver.tokens(i))
    assert calls["product"] > 0


def counted(function: Callable[..., torch.Tensor], calls: Counter[str]) -> Callable[..., torch.Tensor]:
    def called(*arguments: torch.Tensor | None) -> torch.Tensor:
        calls[function.__name__] += 1
        return function(*arguments)

    return called


@pytest.mark.parametrize("family", ["llama", slow("gpt2")])
def test_adapters_in_one_batch(family, models_dir, tmp_path, device):
    """Three adapters through two slots, one of them DoRA, beside a request without any."""
    model = make_model(models_dir, family)
    made = [make_adapter(model, tmp_path, f"a{i}", r=4 * (i + 1), use_dora=i == 1, **OPTIONS[family]) for i in range(3)]
    driver = Driver(engine(model, device, max_adapters=2))
    asked = prompts(400, (12, 5, 20, 9), seed=4)
    for i, prompt in enumerate(asked):
        adapter = None if i == 3 else made[i]
        assert driver.submit(i, prompt, adapter, max_tokens=8, ignore_eos=True) is None
    driver.run()
    for i, prompt in enumerate(asked):
        reference = Reference(model, None if i == 3 else Path(made[i].directory))
        reference.assert_equal(prompt, driver.tokens(i))


@pytest.mark.parametrize(
    "params",
    [
        {}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.0}, {"top_p": 0.999},
    ],
    ids=str,
)  # fmt: skip
def test_choices_are_those_of_the_cpu(params, device):
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(0)) * 2
    asked = [request(**{"temperature": 1.0, "seed": i, **params}) for i in range(64)]
    expected, _ = Sampler([]).sample([(one, 0) for one in asked], logits.clone())
    from engine.sampling.sampler import uniform

    found = choose(logits.to(device), [one.params for one in asked], [uniform(i, 0) for i in range(64)])
    differing = sum(a != b for a, b in zip(found.tolist(), expected, strict=True))
    assert differing <= 1, "a uniform number may fall on a border of the cumulative sums"


def test_mixed_rows_choose_each_by_its_own_rules(device):
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    rules = [SamplingParams(1, temperature=0.0), SamplingParams(1, temperature=1.0), SamplingParams(1, top_k=1)]
    found = choose(logits.to(device), rules, [0.5, 0.5, 0.9]).tolist()
    best = logits.argmax(-1).tolist()
    assert (found[0], found[2]) == (best[0], best[2])


def test_a_row_chooses_the_same_whatever_the_others_are(device):
    logits = (torch.randn(40, 500, generator=torch.Generator().manual_seed(2)) * 2).to(device)
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 2.0}]
    rules = [SamplingParams(1, **kinds[i % 4]) for i in range(40)]
    uniforms = [(i + 0.5) / 40 for i in range(40)]
    together = choose(logits, rules, uniforms).tolist()
    assert together == [int(choose(logits[i : i + 1], [rules[i]], [uniforms[i]])) for i in range(40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # as for attention: no bfloat16 here
@pytest.mark.parametrize(("inner", "columns"), [(64, 48), (300, 70), (1024, 200), (2100, 30), slow(128, 8200)])
def test_weights_in_bytes(inner, columns, dtype, device):
    """Against float64 with the same bytes: rows up to where torch multiplies, and beyond."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(columns, inner, generator=generator).to(dtype)
    weight[3] = 0
    bias = torch.randn(columns, generator=generator).to(dtype)
    for bias_or_none in (bias, None):
        layer = DeviceByteLinear(weight.to(device), None if bias_or_none is None else bias.to(device))
        scales = layer.scales.double().cpu()[:, None]
        rounded = layer.bytes.double().cpu() * scales
        assert ((rounded - weight.double()).abs() <= scales * 0.501).all()
        for rows in (1, 5, 17, 64, products.MOST_ROWS + 1):
            x = torch.randn(2, rows, inner, generator=generator).to(dtype)[:1]
            expected = x.double() @ rounded.T + (0 if bias_or_none is None else bias.double())
            found = layer(x.to(device)).cpu()
            assert found.dtype == dtype
            difference = (found.double() - expected).abs().max() / expected.abs().max()
            assert difference < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("family", ["llama", slow("gpt2")])
def test_a_model_in_bytes_says_nearly_the_same(family, models_dir, device):
    """Teacher-forced: at each place the token that is said is among the reference's best."""
    model = make_model(models_dir, family)
    core = engine(model, device, quantization="int8")
    assert core.info.max_adapter_rank == 0
    driver = Driver(core)
    asked = prompts(400, (30, 5, 41))
    for i, prompt in enumerate(asked):
        driver.submit(i, prompt, max_tokens=12, ignore_eos=True)
    driver.run()
    reference = Reference(model).model
    for i, prompt in enumerate(asked):
        said = driver.tokens(i)
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert float((behind / logits.std(-1)).max()) < 0.3


def test_graph_sizes():
    assert capture_sizes(1) == [1]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]


class Recorded:
    """Counts the replays of CUDA graphs. Where there are none it stands for them: a replay runs the step again over the same buffers."""

    def __init__(self, graphs: DecodeGraphs, device: torch.device) -> None:
        self.graphs, self.runs = graphs, {False: 0, True: 0}
        if device.type == "cpu":
            graphs._record = self._record  # type: ignore[method-assign]
            graphs.capture()
        for key, (replay, logits) in graphs._graphs.items():
            graphs._graphs[key] = (self._counting(key[2], replay), logits)

    def _record(self, size: int, splits: int, adapted: bool):
        logits = self.graphs._step(size, splits, adapted)
        return (lambda: logits.copy_(self.graphs._step(size, splits, adapted))), logits

    def _counting(self, adapted: bool, replay):
        def run() -> None:
            self.runs[adapted] += 1
            replay()

        return run


@torch.inference_mode()
def recorded(core: EngineCore, device: torch.device) -> Recorded:
    backend, runner = core.runner.backend, core.runner
    if device.type == "cpu":
        backend._graphs = DecodeGraphs(
            runner.forward, core.specs, runner.cache, 4, 128, device, backend._slots, backend._layers
        )
    assert backend._graphs is not None
    return Recorded(backend._graphs, device)


@pytest.fixture
def short_pieces(monkeypatch) -> None:
    """Contexts of more than 64 tokens have several pieces."""
    monkeypatch.setattr(paged_attention, "SPLIT_KEYS", 64)


@pytest.mark.parametrize("family", ["qwen2", slow("gemma2")])
def test_decode_over_captured_buffers(family, models_dir, device, short_pieces):
    """Static buffers, padding rows and split contexts give what a step of its own shape gives."""
    model = make_model(models_dir, family)
    core = engine(model, device, max_num_seqs=4, speculative_tokens=0)
    counts = recorded(core, device)
    driver = Driver(core)
    asked = prompts(400, (58, 5, 41))
    for i, prompt in enumerate(asked):
        driver.submit(i, prompt, max_tokens=12 + i, ignore_eos=True)
        driver.step()
    driver.run()
    reference = Reference(model)
    for i, prompt in enumerate(asked):
        reference.assert_equal(prompt, driver.tokens(i))
    assert counts.runs[False] > 10
    assert counts.runs[True] == 0


@pytest.mark.parametrize("family", [slow("qwen2"), slow("gemma2")])
def test_adapters_over_captured_buffers(family, models_dir, tmp_path, device, short_pieces):
    """Adapters that come after the capture, in rows of their own and beside rows without any; DoRA's factors are in no graph."""
    model = make_model(models_dir, family)
    some = {"target_modules": ["q_proj", "v_proj", "up_proj"]}
    made = [
        make_adapter(model, tmp_path, "a0", r=4, **OPTIONS["llama"]),
        make_adapter(model, tmp_path, "a1", r=8, **some),
        make_adapter(model, tmp_path, "a2", r=4, use_dora=True, **OPTIONS["llama"]),
    ]
    core = engine(model, device, max_num_seqs=4, speculative_tokens=0, max_adapters=2)
    counts = recorded(core, device)
    driver = Driver(core)
    asked = prompts(400, (58, 5, 41, 9))
    for i, prompt in enumerate(asked[:3]):
        driver.submit(i, prompt, None if i == 2 else made[i], max_tokens=12 + i, ignore_eos=True)
    driver.run()
    assert counts.runs[True] > 8
    before = dict(counts.runs)
    driver.submit(3, asked[3], made[2], max_tokens=6, ignore_eos=True)
    driver.run()
    assert counts.runs == before
    driver.submit(4, asked[3], made[0], max_tokens=6, ignore_eos=True)
    driver.run()
    assert counts.runs[True] > before[True]
    for i, (prompt, adapter) in enumerate(
        zip([*asked, asked[3]], [made[0], made[1], None, made[2], made[0]], strict=True)
    ):
        reference = Reference(model, None if adapter is None else Path(adapter.directory))
        reference.assert_equal(prompt, driver.tokens(i))


@torch.inference_mode()
def test_captured_steps_compute_what_slots_will_have(models_dir, device):
    """A graph is made before there are adapters, and reads their weights where it found them."""
    core = engine(make_model(models_dir, "qwen2"), device, max_num_seqs=4, speculative_tokens=0, max_adapters=2)
    graphs, layers = recorded(core, device).graphs, core.runner.backend._layers
    places = [(layer._a.data_ptr(), layer._b.data_ptr()) for layer in layers]
    slices = [SequenceSlice(0, 1, 1, [1]), SequenceSlice(1, 1, 1, [2])]
    rows = [torch.tensor([[5, 6]]), torch.tensor([[0, 0]]), torch.tensor([16, 32])]
    graphs._set(2, ForwardBatch(*rows, slices, torch.tensor([0, 1]), [], {}, []), [1, 1])

    def logits(slots: list[int]) -> torch.Tensor:
        graphs._row_slots[:2] = torch.tensor(slots, device=device)
        replay, found = graphs._graphs[2, 1, True]
        replay()
        return found.float().cpu().clone()

    none = logits([2, 2])
    assert torch.equal(logits([0, 1]), none)
    for layer in layers:
        layer._a.normal_(std=0.1)
        layer._b.normal_(std=0.1)
    core.runner.backend._slots.ranks.fill_(core.config.max_adapter_rank)
    assert torch.equal(logits([2, 2]), none)
    assert torch.equal(logits([2, 0])[0], none[0])
    for slots in ([0, 1], [1, 0]):
        assert (logits(slots) - none).abs().amax(1).min() > 0.01
    assert [(layer._a.data_ptr(), layer._b.data_ptr()) for layer in layers] == places


def test_without_room_for_adapters_only_their_steps_have_no_graphs(models_dir, device, monkeypatch, caplog):
    core = engine(make_model(models_dir, "qwen2"), device, max_num_seqs=4, speculative_tokens=0)
    backend, runner = core.runner.backend, core.runner

    def full(layer: SlotLinear) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(SlotLinear, "make_room", full)
    graphs = DecodeGraphs(runner.forward, core.specs, runner.cache, 4, 128, device, backend._slots, backend._layers)
    monkeypatch.setattr(graphs, "_record", lambda *key: (lambda: None, torch.zeros(key[0], 400)))
    graphs.capture()
    assert "decode with adapters runs without graphs: no room" in caplog.text
    assert {adapted for _, _, adapted in graphs._graphs} == {False}
    batch = ForwardBatch(*(torch.zeros(1, 2, dtype=torch.int64),) * 2, torch.zeros(2, dtype=torch.int64),
                         [SequenceSlice(0, 1, 1, [1])], torch.tensor([0]), [], {}, [])  # fmt: skip
    assert graphs.fits(batch)
    assert not graphs.fits(replace(batch, segments=((0, 1, "a"),)))


def test_padding_computes_nothing(models_dir, device):
    """What compiles the kernels before the first request leaves the cache's blocks as they are, but for the padding's own."""
    core = engine(make_model(models_dir, "qwen2"), device)
    backend, runner = core.runner.backend, core.runner
    cache = runner.cache
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(7.0)
    backend._compile(runner.forward, core.specs, cache, 3)
    for tensor in (*cache.keys, *cache.values):
        assert (tensor[1:] == 7.0).all()

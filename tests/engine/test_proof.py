"""The proof of a model sees what depends on length, position or row, however far away it begins."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from engine import attention
from engine.attention import Options
from engine.batch import ForwardBatch, SequenceSlice
from engine.config import EngineConfig
from engine.cpu.attention import PagedAttention
from engine.cpu.backend import CpuBackend
from engine.cpu.fused import FusedDecoder
from engine.models import decoder
from engine.models.limits import LENGTHS, lowered
from engine.models.loader import ModelError, load_model
from engine.models.probe import TOLERANCE, Proof, tolerance_of
from engine.models.record import ProbeError
from engine.shapes import ShapeError
from tests.engine.engines import Driver, Reference, core, prompts
from tests.models.random_models import make_model
from tests.models.tiny_families import tiny_config

LONGEST = 6000
FAR = 4500
"""No probe is so long, and no configuration names it."""


def llama(kind: type[LlamaAttention] = LlamaAttention, **fields):
    """A model whose layers attend as `kind` does."""
    config = AutoConfig.for_model(
        "llama", vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=LONGEST, initializer_range=0.3,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return model


def prove(model) -> tuple[Proof, object]:
    """The proof, and the way to run the model that passed it last."""
    backend = CpuBackend(EngineConfig(model="none", dtype="float32"))
    proof = Proof(model, 2, 100, LONGEST)
    attention.install()
    model.set_attn_implementation(attention.NAME)
    *_, last = backend.candidates(model, proof.specs)
    forward, _ = last()
    proof.check(backend, forward, torch.float32, TOLERANCE[torch.float32])
    return proof, forward


class FarAttention(LlamaAttention):
    """Its queries are longer from position FAR on."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        cosines, sines = position_embeddings
        scale = 1 + (kwargs["position_ids"] >= FAR).float()[..., None] * 0.5
        return super().forward(hidden_states, (cosines * scale, sines), attention_mask, past_key_values, **kwargs)


class RowAttention(LlamaAttention):
    """What it computes depends on a token's row in the step from row `config.floor_scale` on."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        rows = torch.arange(hidden_states.shape[1]) >= self.config.floor_scale
        scale = 1 + 0.5 * rows[None, :, None]
        return super().forward(hidden_states * scale, position_embeddings, attention_mask, past_key_values, **kwargs)


class BiasedAttention(LlamaAttention):
    """It tells its attention of something that no kernel knows."""

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        bias = {"position_bias": torch.zeros(1)}
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs, **bias)


def test_a_plain_model_passes():
    proof, _ = prove(llama())
    assert [spec.window for spec in proof.specs] == [None, None]


def test_a_forward_pass_that_leaves_a_far_position_out_is_found(monkeypatch):
    monkeypatch.setattr(decoder, "_require_code", lambda function, names: None)
    model = llama(FarAttention)
    backend = CpuBackend(EngineConfig(model="none", dtype="float32"))
    proof = Proof(model, 2, 100, LONGEST)
    with pytest.raises(ProbeError, match="positions up to 5999"):
        proof.check(backend, FusedDecoder(model, proof.specs), torch.float32, TOLERANCE[torch.float32])


def test_what_a_flat_forward_pass_would_leave_out_keeps_a_model_from_it():
    model = llama(FarAttention)
    with pytest.raises(ValueError, match=r"FarAttention\.forward uses .*FAR"):
        FusedDecoder(model, Proof(model, 2, 100, LONGEST).specs)
    prove(llama(FarAttention))  # transformers' own code is told the positions


def test_layers_of_several_widths_run_in_transformers_code():
    def wider():
        model = llama()
        mlp, hidden = model.model.layers[1].mlp, model.config.hidden_size
        wide = 2 * model.config.intermediate_size
        mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(hidden, wide, bias=False) for _ in range(2))
        mlp.down_proj = torch.nn.Linear(wide, hidden, bias=False)
        return model

    model = wider()
    with pytest.raises(ValueError, match="several widths"):
        FusedDecoder(model, Proof(model, 2, 100, LONGEST).specs)
    prove(wider())


def test_rows_instead_of_positions_are_found_behind_a_limit_that_no_probe_reaches():
    with pytest.raises(ProbeError, match=r"once a limit is passed \(floor_scale 4096"):
        prove(llama(RowAttention, floor_scale=4096))


def test_unknown_words_to_attention_are_refused():
    with pytest.raises(ProbeError, match="layer 0 tells its attention of position_bias"):
        prove(llama(BiasedAttention))


def test_a_window_that_stands_in_the_mask_alone_is_kept(monkeypatch):
    make = modeling_llama.create_causal_mask

    def windowed(*args, **kwargs):
        return make(*args, **kwargs, and_mask_function=lambda batch, head, query, key: key > query - FAR)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    proof, _ = prove(llama())
    assert [spec.window for spec in proof.specs] == [FAR, FAR]


def test_limits_are_as_before_after_the_proof():
    model = llama(RowAttention, floor_scale=4096, attn_scale=0.1)
    with lowered(model, LONGEST) as names:
        assert names == {"floor_scale": 4096}
        assert (model.config.floor_scale, model.config.attn_scale) == (6, 1.0)
    assert (model.config.floor_scale, model.config.attn_scale) == (4096, 0.1)
    with lowered(model, 4000) as names:
        assert names == {}


@pytest.mark.parametrize("name", [
    "sliding_window", "sliding_window_size", "window_size", "attention_chunk_size", "original_max_position_embeddings", "floor_scale",
    "local_attention", "max_attention_size",
])  # fmt: skip
def test_the_names_of_limits(name):
    assert LENGTHS.fullmatch(name)


def test_a_call_that_was_not_recorded_writes_nothing():
    """More keys than the step has rows, another number of heads, a layer that there is not."""
    model = llama()
    backend = CpuBackend(EngineConfig(model="none", dtype="float32"))
    proof = Proof(model, 2, 100, LONGEST)
    cache = backend.new_cache(proof.specs, 4, 4, torch.float32)
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    row = torch.zeros(1, 3, dtype=torch.int64)
    slots = torch.tensor([4, 5, 6])
    batch = ForwardBatch(row, row, slots, [SequenceSlice(0, 3, 3, [1])], slots, [], {}, [])
    step, options = PagedAttention(cache, batch), Options(None, None, None)
    for layer, heads, kv_heads, rows, dim in (
        (0, 4, 2, 9, 8), (0, 4, 2, 2, 8), (1, 8, 2, 3, 8), (1, 4, 4, 3, 8), (1, 4, 2, 3, 16), (2, 4, 2, 3, 8), (-1, 4, 2, 3, 8),
    ):  # fmt: skip
        key = torch.ones(kv_heads, rows, dim)
        with pytest.raises(ShapeError):
            step.attend(layer, torch.ones(heads, 3, dim), key, key, options)
    after = (*cache.keys, *cache.values)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    batch.slot_mapping = torch.tensor([4, 5, 16])
    with pytest.raises(ShapeError, match="outside of the 16"):
        PagedAttention(cache, batch)
    batch.slot_mapping, batch.sequences = slots, [SequenceSlice(0, 3, 3, [4])]
    with pytest.raises(ShapeError, match="not of the cache's 4"):
        PagedAttention(cache, batch)


def make(path, family, **fields):
    """A tiny model of a family that is refused."""
    config = tiny_config(family)
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama4_text", {}, "layer 0 attends within chunks of 16 tokens"),
        ("llama4_text", {"attention_chunk_size": 512}, "once a limit is passed .*floor_scale 8"),
        ("deepseek_v4", {}, "attends to 30 keys for 24 tokens"),
        ("moshi", {}, "transformers keeps no more of them"),
        ("bert", {}, "tokens that come later"),
        ("lfm2_moe", {}, r"layers 0, 2 do not call attention .* keeps state .*ShortConv"),
        ("mpt", {}, "compute attention themselves"),
    ],
)
def test_families_that_are_refused_by_name(tmp_path, family, fields, reason):
    config = EngineConfig(model=str(make(tmp_path, family, **fields)), dtype="float32", max_model_len=128)
    with pytest.raises(ModelError, match=reason):
        load_model(config, CpuBackend(config))


def test_queries_that_grow_with_their_position_are_served(models_dir):
    model = make_model(models_dir, "ministral3")
    driver = Driver(core(model, max_num_batched_tokens=17, max_num_seqs=4, max_model_len=128))
    (prompt,) = prompts(400, (90,))
    driver.submit(0, prompt, max_tokens=20, ignore_eos=True)
    driver.run()
    Reference(model).assert_equal(prompt, driver.tokens(0))


def test_rounding_adds_up_over_layers():
    """Of bfloat16, whose rounding is near the tolerance of a model of few layers."""
    assert tolerance_of(torch.bfloat16, 4) == TOLERANCE[torch.bfloat16]
    assert TOLERANCE[torch.bfloat16] < tolerance_of(torch.bfloat16, 28) < tolerance_of(torch.bfloat16, 80) < 0.2
    assert tolerance_of(torch.float32, 80) == TOLERANCE[torch.float32]

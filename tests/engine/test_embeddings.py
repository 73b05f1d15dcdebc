"""Embeddings equal those of sentence-transformers, whatever shares the batch; what cannot be served is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from engine.config import EngineConfig
from engine.embedding.core import EmbeddingCore
from engine.failures import Failure, FailureCode
from engine.messages import Embed, Submit, Tenant
from engine.models.files import ModelError, makes_embeddings
from engine.sampling.params import SamplingParams
from tests.engine.encoders import VOCABULARY, encoder

TEXTS = ["Hello, world!", "Paris is the capital of France. " * 4, "a", "What is 2 + 3?", "one two three four five six"]


def vectors(core: EmbeddingCore, inputs, dimensions=None, normalise=None, request_id=1):
    wanted = core.info.embedding.normalise if normalise is None else normalise
    assert core.submit(1, Embed(request_id, inputs, dimensions, wanted)) is None
    while core.has_work:
        outputs = core.step()
    core.check_integrity()
    return np.frombuffer(outputs[1][0].embeddings, dtype="<f4").reshape(len(inputs), -1)


def made_by(directory, **options) -> EmbeddingCore:
    return EmbeddingCore(EngineConfig(model=str(directory), threads=1, **options))


CASES = {
    "mean": ("bert", lambda: [modules.Pooling(32, "mean")]),
    "cls": ("roberta", lambda: [modules.Pooling(32, "cls")]),
    "last token": ("qwen3", lambda: [modules.Pooling(32, "lasttoken")]),
    "several": ("distilbert", lambda: [modules.Pooling(32, ["max", "weightedmean", "mean_sqrt_len_tokens"])]),
    "dense": ("xlm-roberta", lambda: [modules.Pooling(32, "mean"), modules.Dense(32, 12)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", [64, 1024])
def test_vectors_equal_those_of_sentence_transformers(tmp_path, name, budget):
    kind, rest = CASES[name]
    directory = encoder(tmp_path, kind, *rest(), normalise=name != "several")
    assert makes_embeddings(directory)
    core = made_by(directory, max_num_batched_tokens=budget)
    reference = SentenceTransformer(str(directory), device="cpu")
    ids = [reference.tokenizer(text)["input_ids"] for text in TEXTS]
    expected = reference.encode(TEXTS)
    assert core.info.embedding.dimensions == expected.shape[1]
    np.testing.assert_allclose(vectors(core, ids), expected, atol=1e-5 * np.abs(expected).max())
    assert core.info.embedding.normalise == (name != "several")


def test_many_requests_share_steps_and_keep_their_vectors(tmp_path):
    core = made_by(encoder(tmp_path, "bert"), max_num_batched_tokens=64)
    generator = torch.Generator().manual_seed(1)
    jobs = {
        n: [torch.randint(1, VOCABULARY, (1 + (n * 7 + i) % 40,), generator=generator).tolist() for i in range(n)]
        for n in range(1, 9)
    }
    alone = {n: vectors(core, inputs) for n, inputs in jobs.items()}
    for n, inputs in jobs.items():
        assert core.submit(1, Embed(n, inputs, None, True)) is None
    order, together = [], {}
    while core.has_work:
        for output in core.step().get(1, []):
            order.append(output.request_id)
            together[output.request_id] = np.frombuffer(output.embeddings, dtype="<f4").reshape(-1, 32)
    for n in jobs:
        np.testing.assert_allclose(together[n], alone[n], atol=1e-5)
    assert order.index(1) < order.index(8), "a short request does not wait for a long one"


def test_tenants_share_steps_by_weight(tmp_path):
    """However many requests each of them has."""
    core = made_by(encoder(tmp_path, "bert"), max_num_batched_tokens=64, max_waiting_requests=64)
    texts = [[1] * 8] * 16
    for number, name in enumerate([*["many"] * 8, "one", "heavy"]):
        weight = 2.0 if name == "heavy" else 1.0
        assert core.submit(1, Embed(number, texts, None, True, tenant=Tenant(name, weight=weight))) is None
    order = []
    while core.has_work:
        order += [output.request_id for output in core.step().get(1, [])]
    core.check_integrity()
    assert order[:2] == [9, 8]
    assert sorted(order[2:]) == [*range(8)]


def test_one_tenant_holds_half_of_the_places_while_others_wait(tmp_path):
    core = made_by(encoder(tmp_path, "bert"), max_waiting_requests=4)

    def codes(numbers, tenant):
        refused = [core.submit(1, Embed(number, [[1]], None, True, tenant=tenant)) for number in numbers]
        return [None if each is None else each.error.code for each in refused]

    assert codes([1, 2, 3], Tenant("many")) == [None] * 3
    assert codes([4], Tenant("one")) == [None]
    assert codes([5], Tenant("many")) == [FailureCode.OVER_SHARE]
    assert codes([6], Tenant("other")) == [FailureCode.OVERLOADED]


def test_a_plain_directory_is_pooled_and_normalised(tmp_path):
    core = made_by(encoder(tmp_path, "bert"))
    inputs = [[5, 6, 7], [8]]
    unit = vectors(core, inputs)
    raw = vectors(core, inputs, normalise=False)
    with torch.inference_mode():
        expected = core.model.model(input_ids=torch.tensor([inputs[0]])).last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(raw[0], expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    cut = vectors(core, inputs, dimensions=8)
    np.testing.assert_allclose(cut, raw[:, :8] / np.linalg.norm(raw[:, :8], axis=1, keepdims=True), atol=1e-6)


def test_requests_end_by_abort_deadline_and_refusal(tmp_path):
    core = made_by(encoder(tmp_path, "bert", max_position_embeddings=32), max_num_batched_tokens=64)
    assert core.info.max_model_len == 32
    refused = [[], [[]], [[VOCABULARY]], [[-1]], [[1] * 33]]
    for inputs in refused:
        assert core.submit(1, Embed(9, inputs, None, True)).finish_reason == "error"
    assert core.submit(1, Submit(9, [1], SamplingParams(max_tokens=1))).finish_reason == "error"
    for request_id, timeout_s in ((1, None), (2, 0.0), (3, None)):
        assert core.submit(1, Embed(request_id, [[1] * 32] * 4, None, True, timeout_s)) is None
    assert core.submit(1, Embed(3, [[1]], None, True)).error == Failure(FailureCode.REQUEST_ID_IN_USE)
    core.abort(1, [1, 99])
    outputs = {}
    while core.has_work:
        outputs |= {output.request_id: output for output in core.step().get(1, [])}
    core.check_integrity()
    assert {number: output.finish_reason for number, output in outputs.items()} == {1: "abort", 2: "error", 3: "stop"}
    assert outputs[2].error.code is FailureCode.TOO_LATE, "it had not begun at its deadline"


def test_a_step_that_fails_fails_its_requests_alone(tmp_path, monkeypatch):
    core = made_by(encoder(tmp_path, "bert"))
    with monkeypatch.context() as broken:
        broken.setattr(type(core.model), "_forward", lambda *_: 1 / 0)
        core.submit(1, Embed(1, [[1, 2]], None, True))
        output = core.step()[1][0]
    assert (output.finish_reason, core.failed_steps) == ("error", 1)
    assert vectors(core, [[1, 2]]).shape == (1, 32)
    assert core.failed_steps == 0


BAD = {
    "another module": ("modules.json", lambda m: [*m, {"type": "x.LSTM", "path": "3_LSTM"}], "LSTM"),
    "outside": ("modules.json", lambda m: [m[0], {**m[1], "path": "../secret"}], "outside of the model's directory"),
    "no pooling": ("modules.json", lambda m: m[:1], "no Pooling"),
    "not a list": ("modules.json", lambda _: {}, "not a JSON list"),
    "messages": ("sentence_bert_config.json", lambda c: {**c, "modality_config": {"message": {}}}, "chat template"),
    "mode": ("1_Pooling/config.json", lambda c: {**c, "pooling_mode": "median"}, "'median' is not known"),
    "prompt": ("1_Pooling/config.json", lambda c: {**c, "include_prompt": False}, "include_prompt"),
    "activation": ("2_Dense/config.json", lambda c: {**c, "activation_function": "os.system"}, "'system'"),
    "modes": ("1_Pooling/config.json", lambda c: {**c, "pooling_mode": 5}, "'5' is not known"),
    "modalities": ("sentence_bert_config.json", lambda c: {**c, "modality_config": 5}, "chat template"),
    "prompts": (
        "config_sentence_transformers.json",
        lambda c: {**c, "prompts": ["x"], "default_prompt_name": "q"},
        "type",
    ),
    "path": ("modules.json", lambda m: [m[0], {**m[1], "path": "a\0b"}], "cannot be used"),
    "lengths": ("config.json", lambda c: {**c, "matryoshka_dimensions": ["x"]}, "matryoshka_dimensions"),
    "residual": ("2_Dense/config.json", lambda c: {**c, "use_residual": True}, "use_residual"),
}


@pytest.mark.parametrize(
    ("architectures", "embeds"),
    [
        (["BertModel"], True), (["XLMRobertaForMaskedLM"], True), (["Qwen3Model"], True), (["GPT2LMHeadModel"], False),
        (["LlamaForCausalLM"], False), (["BertLMHeadModel"], False), ([], False), (5, False), (None, False),
    ],
)  # fmt: skip
def test_which_models_make_embeddings(tmp_path, architectures, embeds):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "architectures": architectures}))
    assert makes_embeddings(tmp_path) == embeds


def test_what_only_text_models_can_do_is_refused(tmp_path):
    directory = encoder(tmp_path, "bert")
    for options in ({"device": "cuda"}, {"quantization": "int8"}):
        with pytest.raises(ModelError, match="on the CPU"):
            made_by(directory, **options)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, name):
    file, change, reason = BAD[name]
    path = encoder(tmp_path, "bert", modules.Pooling(32, "mean"), modules.Dense(32, 12)) / file
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ModelError, match=reason):
        made_by(tmp_path / "bert")


@pytest.mark.parametrize("kind", ["roberta", "roberta-prelayernorm", "ibert", "mpnet", "bert"])
def test_the_longest_text_is_what_the_table_of_positions_holds(tmp_path, kind):
    """Of some families positions begin after the padding id."""
    core = made_by(encoder(tmp_path, kind, max_position_embeddings=40, pad_token_id=1))
    longest = core.info.max_model_len
    assert longest == (40 if kind == "bert" else 38)
    assert np.isfinite(vectors(core, [[5] * longest])).all()

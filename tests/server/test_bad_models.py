"""Models that cannot be served fail their deployment with a clear reason, and the server stays up."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from engine.config import EngineConfig
from engine.cpu.backend import CpuBackend
from engine.models.loader import ModelError, load_model
from tests.conftest import DEMO
from tests.live import LiveServer, wait_until


def missing(path):
    return str(path / "nothing")


def empty(path):
    return str(path)


def copy(path):
    shutil.copytree(DEMO, path, dirs_exist_ok=True)
    return path


def truncated(path):
    weights = copy(path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return str(path)


def pickled(path):
    (copy(path) / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    return str(path)


def unknown_architecture(path):
    config = json.loads((copy(path) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))
    return str(path)


def missing_weights(path):
    config = json.loads((copy(path) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    return str(path)


def other_shapes(path):
    config = json.loads((copy(path) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 500}))
    return str(path)


def broken_tokenizer(path):
    (copy(path) / "tokenizer.json").write_text("{}")
    return str(path)


def wrong_on_the_paged_path(path):
    from tests.models.random_models import make_model

    return str(make_model(path, "bloom"))


REASONS = [
    (missing, "does not exist"),
    (empty, "config.json is missing"),
    (truncated, "model.safetensors is damaged or truncated"),
    (pickled, "pytorch_model.bin is pickled and never loaded"),
    (unknown_architecture, "'t5' is no language model"),
    (missing_weights, "weights are missing"),
    (other_shapes, "other shapes than config.json says"),
    (broken_tokenizer, "tokenizer.json cannot be used"),
    (wrong_on_the_paged_path, "BloomForCausalLM cannot be served"),
]


@pytest.mark.parametrize(("make", "reason"), REASONS)
def test_the_engine_refuses(tmp_path, make, reason):
    folder = tmp_path / "model"
    folder.mkdir()
    config = EngineConfig(model=make(folder))
    with pytest.raises(ModelError, match=re.escape(reason)):
        load_model(config, CpuBackend(config))


@pytest.mark.parametrize(("make", "reason"), [REASONS[0], REASONS[2]])
def test_the_reason_is_told_and_the_server_stays_up(tmp_path, make, reason):
    folder = tmp_path / "model"
    folder.mkdir()
    live = LiveServer(tmp_path / "var", model=make(folder)).start(wait=False)
    try:
        wait_until(lambda: "failed:" in live.log, 60, lambda: live.log)
        assert reason in live.log
        assert live.get("/health").status_code == 503
        assert live.post("/v1/completions", {"prompt": "x"}).status_code == 503
        assert live.get("/metrics").status_code == 200
    finally:
        assert live.stop() == 0


@pytest.mark.parametrize("config", ["[]", '{"chat_template": ["x"]}', '{"chat_template": "{% if %}"}'])
def test_odd_tokenizer_configs_leave_text_completion(tmp_path, config):
    folder = copy(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(config)
    live = LiveServer(tmp_path / "var", model=str(folder)).start(wait=False)
    try:
        if config == "[]":
            wait_until(lambda: "tokenizer not usable" in live.log, 60, lambda: live.log)
            assert live.post("/v1/completions", {"prompt": "x"}).status_code == 503
        else:
            live.wait_ready()
            assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
            answer = live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
            assert answer.status_code == 400
            assert "no usable chat template" in answer.json()["error"]["message"]
    finally:
        assert live.stop() == 0

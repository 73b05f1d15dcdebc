"""An adapter's files: patterns, configurations, headers and files of every kind that somebody may hand in."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from engine.adapters.files import CONFIG, MAX_CONFIG_BYTES, PART_BYTES, WEIGHTS, content_digest
from engine.adapters.patterns import match
from engine.adapters.peft import read_adapter
from tests.engine.engines import core
from tests.engine.test_adapters import LAYER, VARIANTS, make_adapter
from tests.models.random_models import make_model


@pytest.fixture(scope="module")
def good(models_dir, tmp_path_factory):
    """A good adapter's directory, and the shapes that it is read for."""
    model = make_model(models_dir, "llama")
    ref = make_adapter(model, tmp_path_factory.mktemp("adapters"), "plain", **VARIANTS["plain"])
    return Path(ref.directory), core(model, max_model_len=64).adapters.shapes


@pytest.fixture
def plain(good, tmp_path):
    """A copy of it, to spoil."""
    source, shapes = good
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path, shapes


PATTERNS = [
    "q_proj",
    "layers.0.self_attn.q_proj",
    "model.layers.[0-4].*q_proj",
    "^(?!.*(up|down)).*",
    r"model\.layers\.(1|12)\..*(k|v)_proj",
    "layers.1",
    "proj",
    ".*",
    "gate_proj|up_proj",
    "(?i:Q_PROJ)",
    r"(self_attn)\.o_proj",
    "q_proj|",
    "",
]
NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 12)
    for part in [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
]


@pytest.mark.parametrize("keys", [*([key] for key in PATTERNS), PATTERNS, PATTERNS[::-1]], ids=str)
def test_patterns_match_as_peft_matches_them(keys):
    found = match("rank_pattern", {key: i for i, key in enumerate(keys)}, NAMES)
    expected = {name: get_pattern_key(keys, name) for name in NAMES}
    assert found == {name: keys.index(key) for name, key in expected.items() if key in keys}


@pytest.mark.full
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", ["([a-z._0-9]+)+!", r"(\w+|[.\w]+)+!", "(.*)*(.*)*(.*)*!", r"(\w+\W?)+!$"])
def test_patterns_that_never_end_are_refused_by_name(pattern, field, plain):
    directory, shapes = plain
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | {field: {"q_proj": 8, pattern: 8}}))
    with pytest.raises(match=re.escape(f"{field}: {pattern!r} takes more than")):
        read_adapter(directory, shapes, 64)


@pytest.mark.parametrize("pattern", ["(" * 5000, "(?P<a", "a{99999999999999999999}", "*", "\ud800("])
def test_patterns_that_are_none_are_refused_by_name(pattern):
    with pytest.raises(match="is no pattern"):
        match("rank_pattern", {pattern: 1}, NAMES)


BAD_CONFIGS = {
    b"": "between 1 and",
    b"[" * 100_000: "nested too deeply",
    b"[]": "must be a JSON object",
    b'{"peft_type": "LORA", "r": 8, "r": 9}': "stands twice",
    b'{"peft_type": "LORA", "r": 8, "lora_alpha": NaN}': "NaN is not JSON",
    b'{"peft_type": "LORA", "r": true, "lora_alpha": 8}': "r must be an integer",
    b'{"peft_type": "LORA", "r": 8, "lora_alpha": 1e999}': "lora_alpha must be a positive number",
    b'{"peft_type": "LORA", "r": 8, "lora_alpha": 1' + b"0" * 400 + b"}": "lora_alpha must be a positive number",
    b'{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "rank_pattern": {"a": 1e300}}': "rank_pattern must map",
    b'{"peft_type": "LORA"' + b" " * MAX_CONFIG_BYTES + b"}": "must have between 1 and 1048576 bytes",
    b'\xff\xfe"': "is not a PEFT configuration",
}


@pytest.mark.parametrize("content", BAD_CONFIGS, ids=lambda content: content[:60].decode(errors="replace"))
def test_configurations_of_any_kind_are_refused(content, plain):
    directory, shapes = plain
    (directory / CONFIG).write_bytes(content)
    with pytest.raises(match=BAD_CONFIGS[content]):
        read_adapter(directory, shapes, 64)


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def test_headers_that_lie_are_refused(plain):
    directory, shapes = plain
    good = (directory / WEIGHTS).read_bytes()
    name = f"{LAYER}.lora_A.weight"

    def one(dtype: str = "F32", shape: object = (1, 1), offsets: object = (0, 4)) -> bytes:
        return header(**{name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}) + bytes(4)

    cases = [
        b"\0",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + good[8:],
        (1_200_000).to_bytes(8, "little") + bytes(1_300_000),
        good[:-4],
        good + b"\0",
        header(**{name: []}),
        header(**{name: {}}),
        (200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995,
        one(offsets=(4, 8)),
        one(offsets=(0, 8)),
        one(offsets=(-4, 0)),
        one(shape=(1 << 40, 1 << 40)),
        one(shape=(-1, -1)),
        one(shape=(1,) * 9),
        one(shape=(10**18,) * 20_000),
        one(shape=(0,), offsets=(0, 0)),
        one(dtype="BOOL"),
        one(dtype="I64"),
        header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, b={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}) + bytes(4),
    ]  # fmt: skip
    for case in cases:
        (directory / WEIGHTS).write_bytes(case)
        with pytest.raises(match=r"cannot be read|its header may have|are not supported"):
            read_adapter(directory, shapes, 64)


def test_every_type_of_weights(plain):
    directory, shapes = plain
    good = load_file(directory / WEIGHTS)
    expected = read_adapter(directory, shapes, 64)
    for dtype, tolerance in ((torch.float64, 0), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)):
        save_file({key: tensor.to(dtype) for key, tensor in good.items()}, directory / WEIGHTS, {"format": "pt"})
        found = read_adapter(directory, shapes, 64)
        for path, weights in expected.modules.items():
            torch.testing.assert_close(found.modules[path].b, weights.b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_files_that_are_not_regular_or_too_large_are_refused(name, plain):
    directory, shapes = plain
    path = directory / name

    def refused(reason: str) -> None:
        with pytest.raises(match=reason):
            read_adapter(directory, shapes, 64)

    path.unlink()
    refused(f"{name} is missing")
    os.mkfifo(path)
    refused("is not a regular file")
    for target in ("/dev/zero", "/proc/self/mem", "/proc/self/environ", str(directory)):
        path.unlink()
        path.symlink_to(target)
        refused("is not a regular file|must have between")
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)  # holes take no space
    refused("must have between")


def test_the_digest_stands_for_what_is_read(plain):
    directory, shapes = plain
    digest = content_digest(directory)
    assert read_adapter(directory, shapes, 64, digest=digest).modules
    (directory / CONFIG).write_text((directory / CONFIG).read_text() + " ")
    with pytest.raises(match="changed since it was registered"):
        read_adapter(directory, shapes, 64, digest=digest)


def test_a_file_that_shrinks_while_it_is_read_is_refused(plain):
    directory, shapes = plain
    (directory / WEIGHTS).write_bytes(bytes(3 * PART_BYTES))
    with pytest.raises(match="changed while it was read"):
        read_adapter(directory, shapes, 64, lambda: os.truncate(directory / WEIGHTS, 100))


def changed(directory: Path, **fields) -> None:
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    "pattern", [r"(?i)MODEL\..*_PROJ", r"model\.layers\.(\d)\..*", r"(.*)\.(self_attn|mlp)\..*(_proj)", "q_proj"]
)
def test_a_pattern_of_targets_matches_as_in_peft(pattern):
    expected = {name: True for name in NAMES if re.fullmatch(pattern, name)}
    assert match("target_modules", {pattern: True}, NAMES, whole=True) == expected


def test_a_weight_without_dimensions_is_refused_by_its_shape(plain):
    directory, shapes = plain
    tensors = load_file(directory / WEIGHTS)
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: torch.tensor(1.0)}, directory / WEIGHTS)
    with pytest.raises(Exception, match=re.escape("shape")):
        read_adapter(directory, shapes, 64)


@pytest.mark.parametrize(("fields", "text"), [
    ({"r": 3}, "adapter_config.json says 3"),
    ({"target_modules": []}, "target_modules of adapter_config.json does not name it"),
    ({"target_modules": ["proj"]}, "target_modules of adapter_config.json does not name it"),
    ({"target_modules": "only_this"}, "target_modules of adapter_config.json does not name it"),
    ({"target_modules": 3}, "target_modules must be a list of names, or a pattern"),
    ({"target_modules": [1]}, "target_modules must be a list of names, or a pattern"),
    ({"target_modules": "("}, "is no pattern"),
])  # fmt: skip
def test_a_configuration_that_does_not_fit_the_weights_is_refused(plain, fields, text):
    directory, shapes = plain
    changed(directory, **fields)
    with pytest.raises(Exception, match=re.escape(text)):
        read_adapter(directory, shapes, 64)


def test_a_target_without_weights_is_refused_unless_it_is_left_out(plain):
    directory, shapes = plain
    tensors = load_file(directory / WEIGHTS)
    names = json.loads((directory / CONFIG).read_text())["target_modules"]
    target = sorted(names)[0]
    save_file({key: value for key, value in tensors.items() if f".{target}." not in key}, directory / WEIGHTS)
    with pytest.raises(Exception, match=re.escape(f"target_modules names {target!r}")):
        read_adapter(directory, shapes, 64)
    for fields in ({"exclude_modules": [target]}, {"layers_to_transform": [0]}, {"target_modules": "all-linear"},
                   {"target_modules": ".*"}, {"target_modules": None},
                   {"target_modules": [n for n in names if n != target] + ["absent"]}):  # fmt: skip
        changed(directory, **{"target_modules": names, "exclude_modules": None, "layers_to_transform": None} | fields)
        assert all(f".{target}" not in path for path in read_adapter(directory, shapes, 64).modules)

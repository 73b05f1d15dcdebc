"""What a checkpoint says it is: the format of its weights, the head of its architecture, and tensors that no layer
takes.

transformers drops what it does not know with a warning, and a model that lost its scales or its head would be compared
with the same wrong model. So a checkpoint is refused here, by the name of what is wrong with it. Formats: the
declarations of NVIDIA ModelOpt (`hf_quant_config.json`), of GPTQ and AWQ before transformers knew them
(`quantize_config.json`, `quant_config.json`), and transformers' `quantization_config`; where nothing is declared, the
names and types of the tensors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.files import ModelError, read_json, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMATS = {
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "modelopt_fp4": "NVFP4 (ModelOpt)",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "torchao": "torchao",
}
"""Published formats by `quant_method`."""
OLDER_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
STORED = (
    (re.compile(r"\.weight\.(absmax|quant_map|quant_state\..*)$"), "bitsandbytes"),
    (re.compile(r"\.weight_scale_2$"), "NVFP4"),
    (re.compile(r"\.weight_(packed|shape|global_scale)$"), "compressed-tensors"),
    (re.compile(r"\.(qweight|qzeros)$"), "AWQ or GPTQ"),
    (re.compile(r"_proj_(blocks|scales)$"), "MXFP4"),
    (re.compile(r"\.weight_scale(_inv)?$"), "FP8"),
)
"""Formats by the names of tensors that only they have."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How the names of architectures end that generate text."""
OTHER_HEADS = re.compile(
    r"(Reward\w*|For(Sequence|Token|Image|Audio)Classification|ForQuestionAnswering|ForMultipleChoice|ForRegression)"
)
EMBEDDERS_HEADS = (
    "cls.",
    "lm_head.",
    "pooler.",
    "head.",
    "decoder.",
    "vocab_",
    "predictions.",
    "discriminator_",
    "generator_",
)
"""The heads that an encoder was trained with: its embeddings do not need them."""
UNUSED = re.compile(
    r"rotary_emb\.inv_freq$|position_ids$|\.(attn|attention)\.(masked_)?bias$"  # buffers of older releases
    r"|\.(k|v|kv|q|prob|output|input)_(output_)?scale$"  # of a quantized KV cache or activations
    r"|(^|\.)mtp(_\w+)?\."  # heads that predict further tokens
)
LAYER = re.compile(r"^(?:model|transformer)\.(?:language_model\.)?layers\.(\d+)\.")


def check_format(directory: Path) -> None:
    """Raise ModelError, which names the format, if the weights are not plain floating-point numbers."""
    found = _declared(directory) or _stored(tensor_types(directory))
    if found is not None:
        raise ModelError(
            f"its weights are quantized as {found}, which this release does not read; "
            "serve the checkpoint that it was made from, in bfloat16, float16 or float32"
        )


def tensor_types(directory: Path) -> dict[str, str]:
    """The types of all stored tensors by name, as safetensors spells them ("BF16"). Raises ModelError."""
    types = {}
    for shard in weight_files(directory):
        try:
            with safe_open(shard, framework="pt") as file:
                names = file.keys()
                types.update({name: str(file.get_slice(name).get_dtype()) for name in names})
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weight file {shard.name} is damaged or truncated: {error}") from error
    return types


def check_head(architectures: Any) -> None:
    """Raise ModelError if config.json's `architectures` name something that generates no text."""
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    listed = _listed()
    if names and not any(name in listed or name.endswith(HEADS) for name in names):
        raise ModelError(
            f"config.json names the architecture {names[0]}, which has no language-model head and cannot generate text"
        )


def check_embedders_head(architectures: Any) -> None:
    """Raise ModelError if config.json's `architectures` name a head without which the model means something else."""
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    for name in names:
        if OTHER_HEADS.search(name):
            raise ModelError(f"config.json names the architecture {name}, whose head gives scores and no embeddings")


def check_unexpected(names: Iterable[str], num_layers: int, known: tuple[str, ...] = ()) -> None:
    """Raise ModelError if the files have weights that no layer of the loaded model took. `names`: what transformers
    reports. Left out are layers after the last of `num_layers`, which predict further tokens, and names that begin with
    one of `known`.
    """
    left = sorted(name for name in names if not _unused(name, num_layers, known))
    if left:
        raise ModelError(f"{len(left)} weights of its files belong to no layer of the model, the first is {left[0]}")


def _unused(name: str, num_layers: int, known: tuple[str, ...]) -> bool:
    layer = LAYER.match(name)
    if layer is not None and int(layer[1]) >= num_layers:
        return True
    if name.startswith(known):
        return True
    return UNUSED.search(name) is not None


def _declared(directory: Path) -> str | None:
    """The format that the directory's files name; None: they name none."""
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        declared = place.get("quantization_config") or place.get("compression_config")
        if isinstance(declared, dict):
            return _named(declared)
        if declared is not None:
            raise ModelError("config.json: quantization_config must be an object")
    if (directory / "hf_quant_config.json").is_file():
        declared = read_json(directory / "hf_quant_config.json").get("quantization")
        return _modelopt(declared if isinstance(declared, dict) else {})
    for name, found in OLDER_FILES.items():
        if (directory / name).is_file():
            return found
    return None


def _named(declared: Mapping[str, Any]) -> str:
    method = declared.get("quant_method")
    if method is None:
        if declared.get("load_in_4bit") or declared.get("load_in_8bit"):
            return "bitsandbytes"
        return "compressed-tensors" if "config_groups" in declared else "an unnamed format"
    name = str(method).lower().removeprefix("intel/")
    if name == "modelopt":
        return _modelopt(declared)
    return FORMATS.get(name, repr(str(method)[:40]))


def _modelopt(declared: Mapping[str, Any]) -> str:
    algorithm = declared.get("quant_algo")
    return "ModelOpt" if algorithm is None else f"{str(algorithm)[:40]} (ModelOpt)"


def _stored(types: Mapping[str, str]) -> str | None:
    """The format that the tensors are of, though nothing declares it; None: all weights are floating-point numbers."""
    for name, kind in types.items():
        for pattern, found in STORED:
            if pattern.search(name):
                return found
        if kind.startswith("F8"):
            return "FP8"
        if kind not in FLOATS and name.endswith("weight"):
            return f"{kind} without a declared format"
    return None


def _listed() -> set[str]:
    """Every architecture that transformers lists as a causal language model."""
    listed: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        listed |= {names} if isinstance(names, str) else {*names}
    return listed

"""Finds, checks and reads a model's files before any weight is loaded. Safetensors only; never runs
code of the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoConfig, AutoTokenizer, TokenizersBackend
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

logger = logging.getLogger(__name__)

Json = TypeVar("Json", dict[str, Any], list[Any])

HUB_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*/config.json",
    "*/model.safetensors",
]


OWN_TOKENIZER = "its tokenizer needs code of the model, which is never run; add a tokenizer.json"


class ModelError(Exception):
    """The model cannot be served; the text is the reason, for the operator."""


def locate(source: str) -> Path:
    """The model's directory: `source` itself, or the hub snapshot of that id."""
    if Path(source).is_dir():
        return Path(source).resolve()
    if Path(source).is_file():
        raise ModelError(
            f"{source} is a file; a model is a directory with config.json and safetensors{_of_gguf(source)}"
        )
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(f"the directory {source} does not exist")
    try:
        return Path(snapshot_download(source, allow_patterns=HUB_FILES)).resolve()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{source} is neither a directory nor a model that can be fetched from the hub ({type(error).__name__})"
        ) from error


def _of_gguf(name: str) -> str:
    if not name.endswith(".gguf"):
        return ""
    return "; this release does not read GGUF: serve the checkpoint that it was made from, in safetensors"


def _config(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        raise ModelError("config.json is missing")
    return read_json(directory / "config.json")


def read_json(path: Path, kind: type[Json] = dict) -> Json:  # type: ignore[assignment]
    """A JSON object (or, by `kind`, a list) among the model's files; raises ModelError with the file's name."""
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        raise ModelError(f"{path.name} is not a JSON {'object' if kind is dict else 'list'}")
    return value


def makes_embeddings(directory: Path) -> bool:
    """Whether this is an embedding model: sentence-transformers wrote it, or it has no language-model head."""
    if (directory / "modules.json").is_file():
        return True
    names = _config(directory).get("architectures")
    if (
        not isinstance(names, list)
        or not names
        or any(name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in names)
    ):
        return False
    return all(
        str(name).endswith(("Model", "ForMaskedLM", "ForPreTraining")) and not str(name).endswith("RewardModel")
        for name in names
    )


def check_generates(directory: Path) -> None:
    """Raise ModelError unless transformers lists the architecture as one that generates text."""
    model_type = _config(directory).get("model_type")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        raise ModelError(f"the architecture {model_type!r} is no language model that transformers knows")


def read_config(directory: Path) -> Any:
    """config.json as transformers' configuration class, without remote code; raises ModelError."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, AttributeError, ImportError) as error:
        raise ModelError(f"config.json cannot be used: {error}") from error


def weight_files(directory: Path) -> list[Path]:
    """The files of weights that are loaded: those of the index, or all *.safetensors without one. They may be missing. Raises
    ModelError.
    """
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError("model.safetensors.index.json is not a valid index") from error
    if not all(isinstance(name, str) for name in names):
        raise ModelError("model.safetensors.index.json is not a valid index")
    if any("/" in name or not name.endswith(".safetensors") for name in names):
        raise ModelError("model.safetensors.index.json names files outside of the model's directory")
    return [directory / name for name in names]


def check_weights(directory: Path) -> None:
    """Raise ModelError unless the weights are safetensors, every shard exists, and each header fits its
    file's length.
    """
    shards = weight_files(directory)
    if not shards:
        if any(directory.glob("*.gguf")):
            raise ModelError(f"its weights are in a GGUF file{_of_gguf('.gguf')}")
        pickled = sorted(p.name for p in directory.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        if pickled:
            raise ModelError(f"{pickled[0]} is pickled and never loaded; convert the weights to safetensors")
        raise ModelError("there are no *.safetensors weights in the directory")
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"the weight file {shard.name} is missing")
        try:
            with safe_open(shard, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weight file {shard.name} is damaged or truncated: {error}") from error


def longest_position(hf_config: Any) -> int:
    """The model's own limit of a sequence, in tokens."""
    text = hf_config.get_text_config()
    named = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    return next((int(n) for n in named if isinstance(n, int) and n > 0), 2048)


def max_model_len(hf_config: Any, wanted: int, by_sequence: bool = False) -> int:
    """The longest sequence in tokens: the model's own limit, or `wanted` (0: none) if that is less.

    Rotary embeddings that change with the length of the call ("dynamic", "longrope") would let sequences of one batch
    disturb each other, so such models stop at the length where the change begins, unless it is made `by_sequence`.
    """
    text, own = hf_config.get_text_config(), longest_position(hf_config)
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [] if by_sequence else [rope, *[v for v in rope.values() if isinstance(v, dict)]]:
        if parameters.get("rope_type") in {"dynamic", "longrope"}:
            own = min(own, int(parameters.get("original_max_position_embeddings") or own))
    if wanted > own:
        raise ModelError(f"max_model_len must be at most {own}, the model's own limit, got {wanted}")
    return wanted or own


def tokenizer_file(directory: Path, cache_dir: str) -> Path:
    """The path of tokenizer.json, or of one that transformers converts from older files. A converted one is named after its content:
    workers of other models and versions share `cache_dir`, and who reads the files tells them apart by their paths.
    """
    if (directory / "tokenizer.json").is_file():
        try:
            FastTokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"tokenizer.json cannot be used: {error}") from error
        return directory / "tokenizer.json"
    # Where transformers has no class for it, code of the model would be what splits texts. Its general class converts
    # such files too, and splits them in its own way.
    path = directory / "tokenizer_config.json"
    mapped = read_json(path).get("auto_map") if path.is_file() else None
    own_code = bool(mapped) and (not isinstance(mapped, dict) or "AutoTokenizer" in mapped)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except (ValueError, KeyError, TypeError, OSError, AttributeError, ImportError) as error:
        if own_code:
            raise ModelError(OWN_TOKENIZER) from error
        raise ModelError(f"there is no tokenizer that can be used: {error}") from error
    if own_code and type(tokenizer) is TokenizersBackend:
        raise ModelError(OWN_TOKENIZER)
    content = backend.to_str().encode()
    name = f"tokenizer-{hashlib.sha256(content).hexdigest()}.json"
    target = Path(cache_dir or tempfile.mkdtemp(prefix="dragoman-")) / name
    # A restarted worker finds the converted file, and needs no space on a disk that may be full by then.
    if not target.is_file() or target.read_bytes() != content:
        unfinished = target.with_suffix(f".{os.urandom(8).hex()}")
        try:
            unfinished.write_bytes(content)
            unfinished.rename(target)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
    return target


def end_of_text(directory: Path, tokenizer: Path) -> int | None:
    """The id of the token that tokenizer_config.json, or the older special_tokens_map.json, names as the end of a text.
    None: neither does, whatever they contain instead, or the vocabulary of the tokenizer's file has no such token.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if not (directory / name).is_file():
            continue
        try:
            token = read_json(directory / name).get("eos_token")
        except ModelError as error:  # texts can be completed without
            logger.warning("no end of text is read: %s", error)
            continue
        if isinstance(token, dict):  # an added token with its properties
            token = token.get("content")
        if isinstance(token, str):
            found: int | None = FastTokenizer.from_file(str(tokenizer)).token_to_id(token)
            return found
    return None


def sampling_defaults(directory: Path) -> dict[str, float]:
    """The sampling parameters that generation_config.json sets explicitly; transformers' defaults are
    not the model's.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    raw = read_json(path)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: float(raw[name]) for name in names if isinstance(raw.get(name), (int, float))}

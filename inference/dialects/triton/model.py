"""Model metadata and configuration, and the resolution of model names and versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.errors import ModelNotFound

if TYPE_CHECKING:
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target

EXTENSIONS = ["binary_tensor_data", "parameters", "model_configuration", "model_repository", "statistics", "generate"]
PLATFORM = "dragoman"

FLAGS = ("return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens",
         "return_num_output_tokens")  # fmt: skip
SAMPLING = (("max_tokens", "INT32", [1]), ("temperature", "FP32", [1]), ("top_k", "INT32", [1]), ("top_p", "FP32", [1]),
            ("stop_words", "BYTES", [-1]), ("bad_words", "BYTES", [-1]))  # fmt: skip
"""Parameters that clients of TensorRT-LLM's backend, genai-perf for one, look for among the inputs."""
TEXT_INPUTS = (("text_input", "BYTES", [1]), ("input0", "UINT32", [-1]), ("stream", "BOOL", [1]),
               ("sampling_parameters", "BYTES", [1]), ("exclude_input_in_output", "BOOL", [1]),
               *((name, "BOOL", [1]) for name in FLAGS), *SAMPLING)  # fmt: skip
TEXT_OUTPUTS = (("text_output", "BYTES", [-1]), ("output0", "UINT32", [-1]), ("finish_reason", "BYTES", [-1]),
                ("cumulative_logprob", "FP32", [-1]), ("logprobs", "BYTES", [-1]), ("num_input_tokens", "UINT32", [1]),
                ("num_output_tokens", "UINT32", [-1]))  # fmt: skip
"""The tensors of Triton's vLLM backend, MindIE's token ids, and some of TensorRT-LLM's; its others are taken too, and not listed."""
EMBEDDING_INPUTS = (("input_text", "BYTES", [-1]),)
EMBEDDING_OUTPUTS = (("embeddings", "FP32", [-1, -1]),)


def find(router: EngineRouter, name: str, version: str) -> Target:
    """The deployment or adapter that a path or message names; raises ModelNotFound or Unavailable."""
    if not name:
        raise ModelNotFound(name)
    target = router.resolve(name)
    if version not in ("", "-1", "1", str(target.entry.version)):
        raise ModelNotFound(f"{name}/versions/{version[:20]}")
    return target


def metadata(target: Target, name: str) -> dict[str, Any]:
    """KServe's model metadata."""
    inputs, outputs = _tensors(target)
    return {
        "name": name,
        "versions": [str(target.entry.version)],
        "platform": PLATFORM,
        "inputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in inputs],
        "outputs": [{"name": n, "datatype": d, "shape": s} for n, d, s in outputs],
    }


def configuration(target: Target, name: str) -> dict[str, Any]:
    """Triton's ModelConfig as JSON; optional inputs are those that a request may leave out."""
    inputs, outputs = _tensors(target)
    info = target.info
    parameters = {"max_model_len": info.max_model_len, "dtype": info.dtype, "device": info.device}
    return {
        "name": name,
        "platform": "",
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            {
                "name": n,
                "data_type": _type(d),
                "format": "FORMAT_NONE",
                "dims": [str(x) for x in s],
                "optional": len(inputs) > 1,
            }
            for n, d, s in inputs
        ],
        "output": [{"name": n, "data_type": _type(d), "dims": [str(x) for x in s]} for n, d, s in outputs],
        "model_transaction_policy": {"decoupled": info.embedding is None},
        "parameters": {key: {"string_value": str(value)} for key, value in parameters.items()},
        "instance_group": [
            {
                "name": f"{name}_0",
                "kind": "KIND_GPU" if info.device == "cuda" else "KIND_CPU",
                "count": len(target.clients),
            }
        ],
    }


def _tensors(target: Target) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if target.info.embedding is not None:
        return EMBEDDING_INPUTS, EMBEDDING_OUTPUTS
    return TEXT_INPUTS, TEXT_OUTPUTS


def _type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"

"""The flags of `serve`: those of `vllm serve` that can act here, in groups; others are refused with what to use instead.

Django reads its settings before a command sees its arguments. So `apply_flags` puts flags that are settings into the
environment first; `serve` itself reads the rest. A flag comes before the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from engine import policies

PREFIX = "DRAGOMAN_"
DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of types."""


class FlagError(ValueError):
    """A flag has a value that cannot be meant."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `setting` is the server's setting that it gives; `option` the engine option of the deployment."""

    group: str
    names: tuple[str, ...]
    help: str
    setting: str = ""
    option: str = ""
    type: Callable[[str], Any] = str
    nargs: str | None = None
    choices: tuple[str, ...] | None = None
    constant: Any = None
    """The value of a flag that takes none."""

    @property
    def destination(self) -> str:
        """The name of its value in the parsed arguments."""
        return self.names[0].lstrip("-").replace("-", "_")


def tokens(text: str) -> int:
    """A number of tokens as vLLM reads it: 4096, 4k (4,000), 4K (4,096); auto and -1 are 0, the model's own limit."""
    if text in ("auto", "-1"):
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
    if found is None or (not found[2] and "." in text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens")
    return int(float(found[1]) * {"": 1, "k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20}[found[2]])


def dtype(text: str) -> str:
    """The name of a type here."""
    return DTYPES.get(text, text)


def names(text: str) -> list[str]:
    """A JSON list of strings."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of strings")
    return value


def adapter(text: str) -> tuple[str, str, str]:
    """An adapter as NAME=PATH, or as JSON with `name`, `path` and `base_model_name`: name, path, base model ("": any)."""
    name, _, path = text.partition("=")
    base: Any = ""
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
        name, path, base = value.get("name"), value.get("path"), value.get("base_model_name") or ""
    if not all(isinstance(part, str) for part in (name, path, base)) or not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is neither NAME=PATH nor JSON with a name and a path")
    return name, path, base


MODEL, NETWORK, CORS, ENGINE, ADAPTERS, ANSWERS, TRACES = (
    "model", "network and keys", "pages of other sites", "engine", "adapters", "answers", "traces",
)  # fmt: skip
FLAGS = (
    Flag(MODEL, ("--served-model-name",), "Name by which clients ask for the model.", nargs="+"),
    Flag(NETWORK, ("--host",), "Address that every plane binds.", "host"),
    Flag(NETWORK, ("--port",), "Port of the front plane.", "front_port", type=int),
    Flag(NETWORK, ("--api-key",), "Keys that open the inference routes.", "api_keys", nargs="+"),
    Flag(NETWORK, ("--ssl-certfile",), "File of the certificate chain of every plane.", "tls_certificate"),
    Flag(NETWORK, ("--ssl-keyfile",), "File of its key.", "tls_key"),
    Flag(NETWORK, ("--enable-ssl-refresh",), "Reload changed files; this server always does.", constant=True),
    Flag(CORS, ("--allowed-origins",), "JSON list of origins.", "allowed_origins", type=names),
    Flag(CORS, ("--allowed-methods",), "JSON list of methods.", "allowed_methods", type=names),
    Flag(CORS, ("--allowed-headers",), "JSON list of headers.", "allowed_headers", type=names),
    Flag(CORS, ("--allow-credentials",), "Allow cookies and certificates.", "allow_credentials", constant=True),
    Flag(ENGINE, ("--max-model-len",), "Longest sequence: 4096, 4k, 4K or auto.", "max_model_len", type=tokens),
    Flag(ENGINE, ("--dtype",), "Type of the weights; half and float are float16 and float32.", "dtype", type=dtype,
         choices=("auto", "float32", "bfloat16", "float16")),
    Flag(ENGINE, ("--quantization", "-q"), "Storage of the weights.", "quantization", choices=("none", "int8")),
    Flag(ENGINE, ("--max-num-seqs",), "Most sequences in one step.", "max_num_seqs", type=int),
    Flag(ENGINE, ("--max-num-batched-tokens",), "Most tokens in one step.", "max_num_batched_tokens", type=tokens),
    Flag(ENGINE, ("--kv-cache-memory-bytes",), "Bytes of KV cache on each device.", "kv_cache_bytes", type=int),
    Flag(ENGINE, ("--tensor-parallel-size", "-tp"), "CUDA devices that share the model.", "tensor_parallel_size",
         type=int),
    Flag(ENGINE, ("--block-size",), "Tokens in one block of the KV cache.", option="block_size", type=int),
    Flag(ENGINE, ("--scheduling-policy",), "Order of requests.", option="scheduling_policy", choices=policies.NAMES),
    Flag(ENGINE, ("--enable-prefix-caching",), "Keep blocks for equal prompts (the default).",
         option="prefix_caching", constant=True),
    Flag(ENGINE, ("--no-enable-prefix-caching",), "Keep no blocks.", option="prefix_caching", constant=False),
    Flag(ADAPTERS, ("--enable-lora",), "Serve adapters; this server always does.", constant=True),
    Flag(ADAPTERS, ("--lora-modules",), "Adapters: NAME=PATH, or JSON with name, path and base_model_name.",
         type=adapter, nargs="+"),
    Flag(ADAPTERS, ("--max-loras",), "Most adapters in one step.", option="max_adapters", type=int),
    Flag(ADAPTERS, ("--max-cpu-loras",), "Most adapters in memory.", option="max_cached_adapters", type=int),
    Flag(ADAPTERS, ("--max-lora-rank",), "Largest rank of an adapter.", option="max_adapter_rank", type=int),
    Flag(ANSWERS, ("--enable-prompt-tokens-details",), "Count cached tokens in usage.", "show_cached_tokens",
         constant=True),
    Flag(ANSWERS, ("--enable-auto-tool-choice",), "Let the model call tools; it always may.", constant=True),
    Flag(TRACES, ("--otlp-traces-endpoint",), "URL to which traces are exported, by OTLP over HTTP.",
         "otlp_traces_endpoint"),
)  # fmt: skip
REFUSED = {
    "--root-path": "let the proxy remove the prefix, and set DRAGOMAN_PUBLIC_URL",
    "--gpu-memory-utilization": "use --kv-cache-memory-bytes; without it free memory is used",
    "--tool-call-parser": "the model's chat template decides the format of calls",
    "--reasoning-parser": "the model's chat template decides how reasoning is marked",
    "--chat-template": "put the template into the model's tokenizer_config.json",
    "--tokenizer": "the tokenizer is the model's own",
    "--trust-remote-code": "code of a model is never run",
    "--enforce-eager": "there is no other mode on CPUs, and none without graphs on CUDA",
    "--swap-space": "requests are recomputed, never swapped",
    "--pipeline-parallel-size": "use --tensor-parallel-size",
    "--data-parallel-size": "scale the deployment: `manage.py scale NAME`",
    "--ssl-ca-certs": "set DRAGOMAN_TLS_CLIENT_AUTHORITIES; then every client needs a certificate",
    "--ssl-cert-reqs": "set DRAGOMAN_TLS_CLIENT_AUTHORITIES; then every client needs a certificate",
    "--ssl-ciphers": "only ciphers with forward secrecy and authenticated encryption are used",
    "--max-logprobs": "the limit is 20",
    "--seed": "requests have seeds",
    "--generation-config": "the model's own generation_config.json is used",
}
"""Flags of `vllm serve` that cannot act here, and what to do instead."""


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        parser.error(f"{rest[-1]} cannot act here: {REFUSED[rest[-1]]}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the model and all flags, in groups."""
    groups = {MODEL: parser.add_argument_group(MODEL)}
    groups[MODEL].add_argument("model_given", nargs="?", metavar="MODEL", help="Directory or hub id of the model.")
    groups[MODEL].add_argument("--model", help="The same.")
    for flag in FLAGS:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        add = groups[flag.group].add_argument
        if flag.constant is not None:
            add(*flag.names, dest=flag.destination, action="store_const", const=flag.constant, help=flag.help)
        else:
            add(*flag.names, dest=flag.destination, type=flag.type, nargs=flag.nargs, choices=flag.choices,
                help=flag.help)  # fmt: skip
    for name in REFUSED:
        parser.add_argument(name, action=_Refuse, nargs="?", help=argparse.SUPPRESS)


def engine_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The engine options that the parsed flags set, by name."""
    return {
        flag.option: values[flag.destination]
        for flag in FLAGS
        if flag.option and values.get(flag.destination) is not None
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise FlagError(message)


def apply_flags(arguments: list[str], environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Put the flags that are settings into the environment, and return the flag of each such variable; a mistake is left to
    the command, which explains it.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    try:
        values = vars(parser.parse_known_args(arguments)[0])
    except FlagError:
        return {}
    given = _variables(values)
    environment.update(given)
    return {name: flag.names[0] for flag in FLAGS if (name := PREFIX + flag.setting.upper()) in given}


def unapplied(values: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> str | None:
    """A variable that the parsed flags set and the environment does not have, because `apply_flags` was not called."""
    return next((name for name, text in _variables(values).items() if environment.get(name) != text), None)


def _variables(values: Mapping[str, Any]) -> dict[str, str]:
    given = {f.setting: values[f.destination] for f in FLAGS if f.setting and values.get(f.destination) is not None}
    return {
        PREFIX + setting.upper(): value if isinstance(value, str) else json.dumps(value)
        for setting, value in given.items()
    }

"""Failures of adapters as codes with facts, and their default English texts. Imports no torch."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class AdapterCode(StrEnum):
    """Why an adapter, or a command about it, failed. The fields of a code's template are its facts."""

    # Its files
    MISSING = "missing"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not_a_file"
    LINK = "link"
    CODE = "code"
    PICKLED = "pickled"
    SIZE = "size"
    CHANGED_WHILE_READ = "changed_while_read"
    CHANGED = "changed"
    # adapter_config.json
    BAD_CONFIG = "bad_config"
    TOO_DEEP = "too_deep"
    NO_OBJECT = "no_object"
    NO_PEFT = "no_peft"
    NO_LORA = "no_lora"
    PEFT_TYPE = "peft_type"
    BIAS = "bias"
    FIELD_NOT_SUPPORTED = "field_not_supported"
    REWRITES_BASE = "rewrites_base"
    RANK_FIELD = "rank_field"
    ALPHA_FIELD = "alpha_field"
    RANK_PATTERN = "rank_pattern"
    ALPHA_PATTERN = "alpha_pattern"
    TARGETS_FIELD = "targets_field"
    PATTERN_NOT_NOW = "pattern_not_now"
    PATTERN_INVALID = "pattern_invalid"
    PATTERN_SLOW = "pattern_slow"
    PATTERN_FAILED = "pattern_failed"
    # The header of adapter_model.safetensors
    HEADER_CUT = "header_cut"
    HEADER_SIZE = "header_size"
    HEADER_INVALID = "header_invalid"
    WEIGHT_TYPE = "weight_type"
    WEIGHT_PLACE = "weight_place"
    WEIGHTS_LENGTH = "weights_length"
    # Its weights
    NO_WEIGHTS = "no_weights"
    NOT_LINEAR = "not_linear"
    NO_LAYER = "no_layer"
    TWICE = "twice"
    SHAPE = "shape"
    RANK = "rank"
    """The rank exceeds the worker's `max_adapter_rank`."""
    HALF = "half"
    DORA = "dora"
    NOT_FINITE = "not_finite"
    RANK_MISMATCH = "rank_mismatch"
    NOT_A_TARGET = "not_a_target"
    TARGET_WITHOUT_WEIGHTS = "target_without_weights"
    # The worker
    NO_ADAPTER_LAYERS = "no_adapter_layers"
    NO_ADAPTERS = "no_adapters"
    LOAD_FAILED = "load_failed"
    SLOT_FAILED = "slot_failed"
    NOT_LOADED = "not_loaded"
    PINNED_SLOTS = "pinned_slots"
    IN_USE = "in_use"
    CACHE_IN_USE = "cache_in_use"


TEMPLATES = {
    AdapterCode.MISSING: "{file} is missing",
    AdapterCode.UNREADABLE: "{file} cannot be read: {reason}",
    AdapterCode.NOT_A_FILE: "{file} is not a regular file",
    AdapterCode.LINK: "{file} is a link",
    AdapterCode.CODE: "{file}: adapters with code of their own are not supported",
    AdapterCode.PICKLED: "{file} is pickled, which is never read; save the adapter as safetensors",
    AdapterCode.SIZE: "{file} must have between 1 and {limit} bytes, it has {size}",
    AdapterCode.CHANGED_WHILE_READ: "{file} changed while it was read",
    AdapterCode.CHANGED: "its files have changed since it was registered",
    AdapterCode.BAD_CONFIG: "{file} is not a PEFT configuration: {reason}",
    AdapterCode.TOO_DEEP: "{file} is not a PEFT configuration: it is nested too deeply",
    AdapterCode.NO_OBJECT: "{file} must be a JSON object",
    AdapterCode.NO_PEFT: "{file} is not a PEFT configuration",
    AdapterCode.NO_LORA: "the adapter must be a LoRA with a rank between 1 and {limit}",
    AdapterCode.PEFT_TYPE: "{file}: peft_type must be LORA",
    AdapterCode.BIAS: '{file}: bias must be "none", got {bias}',
    AdapterCode.FIELD_NOT_SUPPORTED: "{file}: {field} is not supported",
    AdapterCode.REWRITES_BASE: "{file}: init_lora_weights {init} rewrites the base model's weights",
    AdapterCode.RANK_FIELD: "{file}: r must be an integer between 1 and {limit}",
    AdapterCode.ALPHA_FIELD: "{file}: lora_alpha must be a positive number",
    AdapterCode.RANK_PATTERN: "{file}: rank_pattern must map module names to integers between 1 and {limit}",
    AdapterCode.ALPHA_PATTERN: "{file}: alpha_pattern must map module names to positive numbers",
    AdapterCode.TARGETS_FIELD: "{file}: target_modules must be a list of names, or a pattern",
    AdapterCode.PATTERN_NOT_NOW: "{file}: {field} cannot be matched now: {reason}",
    AdapterCode.PATTERN_INVALID: "{file}: {field}: {pattern} is no pattern",
    AdapterCode.PATTERN_SLOW: "{file}: {field}: {pattern} takes more than {limit_s} s to match",
    AdapterCode.PATTERN_FAILED: "{file}: {field}: {pattern} cannot be matched",
    AdapterCode.HEADER_CUT: "{file} cannot be read: it is shorter than its header says",
    AdapterCode.HEADER_SIZE: "{file}: its header may have {limit} bytes, it has {size}",
    AdapterCode.HEADER_INVALID: "{file} cannot be read: its header is not valid",
    AdapterCode.WEIGHT_TYPE: "{tensor}: weights of the type {dtype} are not supported",
    AdapterCode.WEIGHT_PLACE: "{file} cannot be read: {tensor} does not lie where the header says",
    AdapterCode.WEIGHTS_LENGTH: "{file} cannot be read: it has {size} bytes of tensors, its header says {declared}",
    AdapterCode.NO_WEIGHTS: "{file} holds no adapted layer",
    AdapterCode.NOT_LINEAR: "{tensor}: only LoRA on linear layers is supported",
    AdapterCode.NO_LAYER: "{tensor}: the model has no linear layer {layer} that takes adapters",
    AdapterCode.TWICE: "{file} has weights for {layer} under two names",
    AdapterCode.SHAPE: "{tensor}: its shape is {shape}, the layer takes {wanted}",
    AdapterCode.RANK: "{tensor}: the rank must be between 1 and {limit}, got {rank}",
    AdapterCode.HALF: "{layer}: lora_A or lora_B is missing",
    AdapterCode.DORA: "{layer}: use_dora and the magnitude vectors do not fit together",
    AdapterCode.NOT_FINITE: "{layer}: a weight is not a finite number, or the magnitude of a row of zeros",
    AdapterCode.RANK_MISMATCH: "{layer}: the rank is {rank}, {file} says {declared}",
    AdapterCode.NOT_A_TARGET: "{layer}: it has weights, but target_modules of {file} does not name it",
    AdapterCode.TARGET_WITHOUT_WEIGHTS: "{file}: target_modules names {target}, a layer of the model without weights here",
    AdapterCode.NO_ADAPTER_LAYERS: "this model's layers take no adapters",
    AdapterCode.NO_ADAPTERS: "this model takes no adapters",
    AdapterCode.LOAD_FAILED: "it cannot be loaded: {reason}",
    AdapterCode.SLOT_FAILED: "it cannot be put into a slot: {reason}",
    AdapterCode.NOT_LOADED: "the adapter is not loaded",
    AdapterCode.PINNED_SLOTS: "at most {limit} of {slots} slots can be pinned",
    AdapterCode.IN_USE: "the adapter is in use",
    AdapterCode.CACHE_IN_USE: "every adapter in the cache is in use",
}
"""The default English of each code, with its facts by name."""

Facts = dict[str, str | int | float]


class AdapterFailure(msgspec.Struct, array_like=True, frozen=True):
    """A code and its facts. Arbitrary text from the adapter's files is quoted as by `repr`."""

    code: AdapterCode
    facts: Facts = {}

    @property
    def words(self) -> str:
        """The default English."""
        return TEMPLATES[self.code].format(**self.facts)


class AdapterError(Exception):
    """The adapter cannot be served; `failure` is the reason."""

    def __init__(self, code: AdapterCode, **facts: str | int | float) -> None:
        self.failure = AdapterFailure(code, facts)
        super().__init__(self.failure.words)

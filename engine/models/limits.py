"""Lowers the lengths at which a model changes its computation, so that short prompts can test them.

Such lengths are windows, chunks, the original length of rope scaling, and the floor of a temperature; most real ones
are too long to compute when a worker starts. They are set in the configuration and in module attributes.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

LOWERED = 6
"""The value, in tokens, that every limit is lowered to."""
LENGTHS = re.compile(
    r"(?!.*(layer|pattern|num_|feed_forward|original_max_seq_len))"
    r".*(window|chunk|floor_scale|floor_len|original_max_|local_attention|attention_span|attention_context|max_attention).*"
)
"""Names of numbers of tokens (not of layers) at which a computation changes; a rotary embedding's `original_max_seq_len` counts only
where it changes BY_CALL.
"""
STRENGTHS = re.compile(r"(llama_4_scaling_beta|attn_scale|.*temperature_(scale|beta))$")
"""Names of the strengths of such changes; set to 1 in the test, so that rounding does not hide the change."""
BY_CALL = {"dynamic", "longrope"}
"""Rotary embeddings that change with the longest sequence of a call. The engine makes that a matter of each sequence,
or stops short of that length.
"""


@contextmanager
def lowered(model: PreTrainedModel, longest: int) -> Iterator[dict[str, int]]:
    """Lower the limits of at most `longest` tokens inside the block; yields their names and real values."""
    found: dict[str, int] = {}
    changed: list[tuple[Any, str, Any]] = []
    try:
        for place in _places(model):
            by_call = _changes_by_call(place)
            for name, value in _held(place):
                if type(value) is int and LOWERED < value <= longest and LENGTHS.fullmatch(name):
                    if by_call and "original_max" in name:
                        continue
                    found[name] = value
                    _put(place, name, LOWERED, changed)
                elif type(value) is float and 0 < value < 1 and STRENGTHS.fullmatch(name):
                    _put(place, name, 1.0, changed)
        yield found
    finally:
        for place, name, value in reversed(changed):
            _put(place, name, value, [])


def named_lengths(model: PreTrainedModel) -> list[int]:
    """All numbers of tokens in the configuration."""
    numbers: set[int] = set()
    for place in _configs(model):
        numbers |= {
            value
            for name, value in _held(place)
            if type(value) is int and value > LOWERED and (LENGTHS.fullmatch(name) or "max_position" in name)
        }
    return sorted(numbers)


def _held(place: Any) -> list[tuple[str, Any]]:
    """The names and values in a configuration, a module or a dictionary."""
    held = place if isinstance(place, dict) else vars(place)
    return [(name, value) for name, value in held.items() if isinstance(name, str)]


def _put(place: Any, name: str, value: Any, changed: list[tuple[Any, str, Any]]) -> None:
    if isinstance(place, dict):
        changed.append((place, name, place[name]))
        place[name] = value
    else:
        changed.append((place, name, vars(place)[name]))
        vars(place)[name] = value  # not by setattr, with which some configurations check other fields


def _changes_by_call(place: Any) -> bool:
    parameters = place if isinstance(place, dict) else getattr(place, "rope_parameters", None) or {}
    kinds = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return any(kind.get("rope_type") in BY_CALL for kind in kinds)


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every configuration of the model and its parts, and the dictionaries in them, once each."""
    places: dict[int, Any] = {}
    waiting = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    while waiting:
        place = waiting.pop()
        if id(place) in places:
            continue
        places[id(place)] = place
        parts = place.values() if isinstance(place, dict) else vars(place).values()
        waiting += [part for part in parts if isinstance(part, dict | PreTrainedConfig)]
    return list(places.values())


def _places(model: PreTrainedModel) -> list[Any]:
    return [*_configs(model), *model.modules()]

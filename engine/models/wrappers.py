"""Models that read images, sound or video beside text: their decoder is served, and what makes embeddings of anything
but text is left out of memory. What comes in as an image never reaches this code: the dialects refuse it.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

TOKENS = tuple(range(3, 27))
"""Of the pass that shows which parts a text needs, before those that stand for images and the like."""
PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech)\w*_token_(id|index)$")
"""Names of such tokens in a configuration."""


def generator_class(hf_config: PreTrainedConfig) -> Any:
    """The automatic class of transformers for a model that generates text: by itself, or beside what it reads."""
    alone = hf_config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if alone else AutoModelForMultimodalLM


@torch.inference_mode()
def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model that is served for texts. Where its decoder is one that transformers also has by itself, this is that:
    it runs as fast as any other of its kind. Otherwise it is `model`, without the parts that no text needs.
    """
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or decoder.config is model.config:
        return model
    ids = _text(model, decoder)
    alone = _alone(model, decoder)
    if alone is not None and _same_logits(model, alone, ids):
        return alone
    _drop(model, _beside(model, decoder), ids)
    return model


def _alone(model: PreTrainedModel, decoder: PreTrainedModel) -> PreTrainedModel | None:
    """The causal language model of the same decoder and output layer; None: transformers has none."""
    config = decoder.config
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    with torch.device("meta"):
        alone: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    prefix, head = alone.base_model_prefix, model.get_output_embeddings()
    if type(getattr(alone, prefix, None)) is not type(decoder) or head is None:
        return None
    setattr(alone, prefix, decoder)
    alone.set_output_embeddings(head)
    alone.generation_config = model.generation_config
    return alone.eval() if all(weight.device.type != "meta" for weight in alone.parameters()) else None


def _same_logits(model: PreTrainedModel, alone: PreTrainedModel, ids: torch.Tensor) -> bool:
    try:
        return bool(torch.equal(_read(model, ids), _read(alone, ids)))
    except Exception as error:  # of any kind, by what is around the decoder
        logger.info("%s is not served as %s: %s", type(model).__name__, type(alone).__name__, error)
        return False


def _drop(model: PreTrainedModel, beside: list[tuple[nn.Module, str, nn.Module]], ids: torch.Tensor) -> None:
    """Free the memory of the parts that no pass over a text calls. Models whose code looks at such a part without
    calling it keep all of them.
    """
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(module))
        for _, _, part in beside
        for module in part.modules()
    ]
    try:
        whole = _read(model, ids)
    except Exception as error:  # of any kind; the proof refuses the model by its reason
        logger.info("%s does not read a text: %s", type(model).__name__, error)
        return
    finally:
        for hook in hooks:
            hook.remove()
    unused = [each for each in beside if called.isdisjoint(each[2].modules())]
    for parent, name, _ in unused:
        setattr(parent, name, None)
    try:
        same = torch.equal(_read(model, ids), whole)
    except Exception as error:  # of any kind, by code that looks at such a part
        logger.info("%s keeps what reads images or sound: %s", type(model).__name__, error)
        same = False
    if not same:
        for parent, name, part in unused:
            setattr(parent, name, part)


def _beside(model: PreTrainedModel, decoder: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, part) of each part that hangs on the way from the model down to its decoder."""
    found: list[tuple[nn.Module, str, nn.Module]] = []
    parent: nn.Module = model
    while parent is not decoder:
        below: nn.Module | None = None
        for name, part in parent.named_children():
            if any(module is decoder for module in part.modules()):
                below = part
            else:
                found.append((parent, name, part))
        if below is None:
            return []
        parent = below
    return found


def _text(model: PreTrainedModel, decoder: PreTrainedModel) -> torch.Tensor:
    """Ids [1, T] of a text with every token that stands for an image or the like: some models embed these otherwise."""
    held = (value for name, value in vars(model.config).items() if PLACEHOLDER.match(name) and isinstance(value, int))
    known = [token for token in held if 0 <= token < decoder.config.vocab_size]
    return torch.tensor([[*TOKENS, *known]], device=model.device)


def _read(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits

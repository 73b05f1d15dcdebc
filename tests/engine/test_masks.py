"""What a layer's mask lets it see is read at every distance, not only at those that a probe computes."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    or_masks,
    sliding_window_causal_mask_function,
)

from engine.models.masks import MaskError, window_of_function, window_of_tensor

LENGTH = 5000


def hides_one_key(batch, head, query, key):
    return (key != 3) | (query < 4000)


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (causal_mask_function, None),
        (sliding_window_causal_mask_function(7), 7),
        (sliding_window_causal_mask_function(4097), 4097),
        (sliding_window_causal_mask_function(LENGTH), None),
        (chunked_causal_mask_function(LENGTH, torch.zeros(1, dtype=torch.int64)), None),
    ],
)
def test_windows(function, window):
    assert window_of_function(function, LENGTH) == window


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (chunked_causal_mask_function(4096, torch.zeros(1, dtype=torch.int64)), "within chunks of 4096 tokens"),
        (chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)), "within chunks of 16 tokens"),
        (lambda batch, head, query, key: query >= 0, "tokens that come later"),
        (or_masks(causal_mask_function, lambda batch, head, query, key: key < 10), "neither causal nor"),
        (and_masks(causal_mask_function, hides_one_key), "neither causal nor"),
        (lambda batch, head, query, key: key < query, "neither causal nor"),
    ],
)
def test_masks_that_the_kernels_do_not_know(function, reason):
    with pytest.raises(MaskError, match=reason):
        window_of_function(function, LENGTH)


def additive(function, rows=24):
    return eager_mask(1, rows, rows, mask_function=function)


def test_tensors():
    assert window_of_tensor(additive(causal_mask_function)) is None
    assert window_of_tensor(additive(sliding_window_causal_mask_function(5))) == 5
    assert window_of_tensor(torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()) is None


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (additive(causal_mask_function) - 0.5 * torch.arange(24), "a bias"),
        (torch.zeros(1, 1, 24, 24), "tokens that come later"),
        (additive(causal_mask_function)[..., :20], "sees 20 keys for 24 tokens"),
        (
            torch.cat([additive(causal_mask_function), additive(sliding_window_causal_mask_function(5))], 1),
            "from each of its heads",
        ),
    ],
)
def test_tensors_that_the_kernels_do_not_know(mask, reason):
    with pytest.raises(MaskError, match=reason):
        window_of_tensor(mask)

"""A model of transformers attends without elements as it does with them."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain import Recipe, Settings, fit
from drivetrain.registry import find_driver
from drivetrain.symbolic.first_batch import first_batch
from drivetrain.symbolic.step import symbolic_step

SETTINGS = Settings(steps=1, global_batch=4)


def model() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=50, use_cache=False, **sizes, **heads)
    built: nn.Module = LlamaForCausalLM(config)
    return built


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = module(input_ids=batch, labels=batch).loss
    return found * len(batch)


RECIPE = Recipe(model, loss, torch.zeros(16, 24, dtype=torch.int64))


def test_it_makes_no_mask_that_a_run_does_not_make() -> None:
    attend, masks = F.scaled_dot_product_attention, []

    def attending(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        masks.append(attn_mask if attn_mask is None else tuple(attn_mask.shape))
        return attend(*args, attn_mask=attn_mask, **kwargs)

    driver = find_driver("cpu")
    with patch.object(F, "scaled_dot_product_attention", attending):
        fit(RECIPE, SETTINGS, backend="cpu", progress=False)
        of_run = {*masks}
        masks.clear()
        batch_of = partial(first_batch, RECIPE, SETTINGS)
        symbolic_step(RECIPE, driver, SETTINGS.plan(), SETTINGS, 1, batch_of)
    assert {*masks} == of_run == {None}

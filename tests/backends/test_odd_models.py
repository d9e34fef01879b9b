"""Models that a driver cannot train are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from drivetrain import Recipe, Settings
from drivetrain.backends.common.models import refuse_sparse
from drivetrain.kernel.errors import CapabilityRefused, RecipeError
from drivetrain.trainer.fit import fit


def squared(module: nn.Module, batch: Any) -> Any:
    return module(batch).square().sum()


def test_a_parameter_without_a_shape_is_named() -> None:
    recipe = Recipe(lambda: nn.Sequential(nn.LazyLinear(2)), squared, [[1.0], [2.0]])
    with pytest.raises(RecipeError, match=r"made 0\.weight, 0\.bias without a shape"):
        fit(recipe, Settings(steps=1), backend="cpu")


def test_sparse_gradients_are_refused_where_they_are_sharded() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(4, 2, sparse=True))
    with pytest.raises(CapabilityRefused, match=r"'fsdp' refuses Embedding.sparse=True. in '1'"):
        refuse_sparse(model, "fsdp")
    refuse_sparse(model[0], "fsdp")

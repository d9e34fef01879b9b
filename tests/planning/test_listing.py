"""Meshes that partition layers are listed for models with a plan of their layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from drivetrain.planning.search import LeftOut

from .searching import RECIPE, WIDTH, Block, searching, ways


def with_plan(style: str) -> nn.Module:
    """Build a model that says how its layers are partitioned, as those of transformers do."""
    model = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    model.tp_plan = {"0.up": "colwise", "0.down": style}  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("style", ["rowwise", "diagonal"])
def test_they_are_listed_also_with_a_style_that_is_refused(style: str) -> None:
    search = searching(80e9, ("precision",), replace(RECIPE, model=lambda: with_plan(style)))
    found = [way for way in ways(search, "mesh") if way.options.get("tensor", 1) == 2]
    assert len(found) == 1
    (last, *_) = search.look(found[0])
    assert isinstance(last, LeftOut) == (style == "diagonal")
    assert not isinstance(last, LeftOut) or "by 'diagonal', which is not done here" in last.reason


def test_they_are_not_listed_without_a_plan() -> None:
    search = searching(80e9, ("precision",))
    assert all(way.options.get("tensor", 1) == 1 for way in ways(search, "mesh"))

"""Ways are looked at in several processes: in order, and with a message if one dies."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest.mock import patch

import pytest

from drivetrain.kernel.errors import DrivetrainError
from drivetrain.planning import processes
from drivetrain.planning.processes import look_at_all

from .searching import RECIPE, SETTINGS, searching, ways


@pytest.mark.parametrize("cores", [1, 3])
def test_what_becomes_of_each_way_is_yielded_in_order(cores: int) -> None:
    search = searching(80e9, ("micro_batch", "activation_checkpointing"))
    several = ways(search, "ddp", replace(SETTINGS, micro_batch=4)) * 2
    with patch.object(processes, "num_cores", lambda: cores):
        found = [*look_at_all(search, several)]
    assert found == [search.look(way) for way in several]
    precisions = [each.choice.settings["precision"] for (each,) in found]
    assert precisions == ["fp32", "bf16"] * 2


def test_a_process_that_dies_is_named() -> None:
    parent = os.getpid()

    def dying() -> object:
        if os.getpid() != parent:
            os._exit(9)
        return RECIPE.model()

    search = searching(80e9, recipe=replace(RECIPE, model=dying))  # type: ignore[arg-type]
    with (
        patch.object(processes, "num_cores", lambda: 2),
        pytest.raises(DrivetrainError, match="has died"),
    ):
        [*look_at_all(search, ways(search, "ddp"))]

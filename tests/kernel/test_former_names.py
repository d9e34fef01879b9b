"""Former names of the driver contract still work, with a warning that gives the new one."""

from __future__ import annotations

import pytest
import torch

from drivetrain.backends.common.model_state import dealt_pieces, partitioned_pieces
from drivetrain.kernel.contract import World


def test_former_names_of_a_world() -> None:
    world = World(1, 4, torch.device("cpu"), feeder_index=1, num_feeders=4, feeders_per_reader=2)
    with pytest.warns(DeprecationWarning, match="World.leads is now World.is_first_of_reader"):
        assert world.leads is world.is_first_of_reader is False
    with pytest.warns(DeprecationWarning, match="counts_once is now World.replicated_sum_weight"):
        assert world.counts_once == world.replicated_sum_weight == 0.5


def test_the_former_name_of_partitioned_pieces() -> None:
    tensors = {"weights": {"one": torch.ones(2), "other": torch.ones(3)}}
    with pytest.warns(DeprecationWarning, match="partitioned_pieces"):
        former = [piece.name for piece in dealt_pieces(tensors, 0, 2)]  # type: ignore[arg-type]
    own = [piece.name for piece in partitioned_pieces(tensors, 0, 2)]  # type: ignore[arg-type]
    assert former == own == ["one"]

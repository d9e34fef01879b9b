"""Meshes have the curve of one process."""

from __future__ import annotations

import pytest
from meshes import Compared, parameters


@pytest.mark.parametrize("compared", parameters())
def test_a_mesh_has_the_curve_of_one_process(compared: Compared) -> None:
    """Losses, norms of the gradient, evaluations, weights, and what the whole module computes; also
    on a rank whose experts are given no token, or that never holds all logits."""
    compared.compare()

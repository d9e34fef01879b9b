"""Meshes have the curve of one process."""

from __future__ import annotations

import pytest
from few_cases import only_quick
from meshes import MESHES, Compared


@pytest.mark.parametrize("compared", only_quick(MESHES, lambda each: each.always), ids=str)
def test_a_mesh_has_the_curve_of_one_process(compared: Compared) -> None:
    """Compare losses, gradient norms, evaluations, weights, and the outputs of the whole module;
    also on a rank whose experts receive no token, and on one that never holds all logits.
    """
    compared.compare()

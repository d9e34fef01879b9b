"""A head whose outputs stay cut: in bf16, and what is refused. See `meshes` for fp32."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_decoder import mesh, train

from drivetrain.conformance.harness import WorkerFailure


@pytest.mark.slow
def test_mixed_precision() -> None:
    """As with a head that is whole, to the roundings of 2**-8 of a few hundred products."""
    settings: dict[str, Any] = {"precision": "bf16"}
    cut, whole = (
        mesh(2, tensor=2).run(train, plan=plan, settings=settings)[0]["curve"]
        for plan in ("logits", "in sequence")
    )
    for (loss, norm), (expected, its_norm) in zip(cut, whole, strict=True):
        assert loss == pytest.approx(expected, rel=2**-6)
        assert norm == pytest.approx(its_norm, rel=2**-4)


@pytest.mark.slow
def test_a_rank_must_have_words() -> None:
    with pytest.raises(WorkerFailure, match=r"13 rows the last .* backend.tensor=7 would do"):
        mesh(8, tensor=8).run(train, alone=True, plan="logits", heads=8)


def test_another_loss_is_refused() -> None:
    with pytest.raises(WorkerFailure, match="cut the head by 'vocabulary', which gives each rank"):
        mesh(2, tensor=2).run(train, plan="logits", lossy="by_hand")

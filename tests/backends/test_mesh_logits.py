"""A head whose outputs stay cut: in bf16, and what is refused. See `meshes` for fp32."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_decoder import assert_near, mesh, train

from drivetrain.conformance.harness import WorkerFailure


@pytest.mark.slow
def test_mixed_precision() -> None:
    """As with a head that is whole."""
    settings: dict[str, Any] = {"precision": "bf16"}
    cut, whole = (
        mesh(2, tensor=2).run(train, plan=plan, settings=settings)[0]["curve"]
        for plan in ("logits", "in sequence")
    )
    assert_near(cut, whole, "bf16")


@pytest.mark.slow
def test_a_rank_must_have_words() -> None:
    with pytest.raises(WorkerFailure, match=r"13 rows the last .* backend.tensor=7 would do"):
        mesh(8, tensor=8).run(train, alone=True, plan="logits", heads=8)


def test_another_loss_is_refused() -> None:
    with pytest.raises(WorkerFailure, match="cut the head by 'vocabulary', which gives each rank"):
        mesh(2, tensor=2).run(train, plan="logits", lossy="by_hand")

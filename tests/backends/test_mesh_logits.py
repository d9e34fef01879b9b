"""A head whose outputs stay partitioned: in bf16, and refusals. `meshes` compares it in fp32."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_decoder import assert_near, mesh, train

from drivetrain.conformance.harness import WorkerFailure


@pytest.mark.slow
def test_mixed_precision() -> None:
    """Compare with a head that is not partitioned."""
    settings: dict[str, Any] = {"precision": "bf16"}
    partitioned, whole = (
        mesh(2, tensor=2).run(train, plan=plan, settings=settings)[0]["curve"]
        for plan in ("logits", "in sequence")
    )
    assert_near(partitioned, whole, "bf16")


@pytest.mark.slow
def test_a_rank_must_have_words() -> None:
    with pytest.raises(WorkerFailure, match=r"13 rows the last .* backend.tensor=7 would do"):
        mesh(8, tensor=8).run(train, alone=True, plan="logits", heads=8)


@pytest.mark.slow
def test_another_loss_is_refused() -> None:
    with pytest.raises(WorkerFailure, match="the head by 'vocabulary', which gives each rank"):
        mesh(2, tensor=2).run(train, plan="logits", lossy="by_hand")

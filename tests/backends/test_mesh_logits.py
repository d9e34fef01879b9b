"""A head whose outputs stay cut learns as a whole one."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_decoder import train
from test_mesh import alone, assert_alike, mesh

from drivetrain.conformance.harness import WorkerFailure


@pytest.mark.parametrize(
    ("size", "dimensions"),
    [
        (2, {"tensor": 2}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (4, {"tensor": 4}),
                (4, {"tensor": 2}),
                (4, {"tensor": 2, "context": 2}),
            ]
        ),
    ],
    ids=str,
)
def test_no_rank_holds_all_logits(size: int, dimensions: dict[str, int]) -> None:
    """Losses, norms, evaluations and weights are those of one process."""
    for seen in mesh(size, **dimensions).run(train, plan="logits", lossy="of_parts"):
        assert_alike(seen, alone())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16"])
def test_mixed_precision(precision: str) -> None:
    """As with a head that is whole, to the roundings of 2**-8 of a few hundred products."""
    settings: dict[str, Any] = {"precision": precision}
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

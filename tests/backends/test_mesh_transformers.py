"""Models of transformers through compat's Trainer on meshes: losses of one process, or refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_decoder import mesh
from mesh_transformers import LENGTH, train

from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject


@functools.cache
def alone(folder: Path, kind: str) -> dict[str, Any]:
    """What one process makes of it."""
    return Subject("cpu").run(train, folder=str(folder), **MODELS[kind])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


def assert_alike(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("losses", "norms", "evaluated"):
        torch.testing.assert_close(seen[name], expected[name], rtol=1e-5, atol=0)
    assert seen["rows"] == expected["rows"] == 8
    assert seen["global batch"] == expected["global batch"] == 8


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "mixtral": {"kind": "mixtral"},
    "adapted llama": {"kind": "llama", "model": {"adapter": True}},
    "adapted mixtral": {"kind": "mixtral", "model": {"adapter": True}},
    "balanced": {"kind": "mixtral", "model": {"output_router_logits": True}},
}


RECOMPUTED = {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}


@pytest.mark.row("X25")
@pytest.mark.parametrize(
    ("model", "dimensions", "asked"),
    [
        ("llama", {"tensor": 2}, {"sizes": {"tp_size": 2}}),
        ("llama", {"context": 2}, {"sizes": {"cp_size": 2}}),
        ("llama", {"context": 2}, {"sizes": {"cp_size": 2}, "given": RECOMPUTED}),
        ("adapted llama", {"context": 2}, {"sizes": {"cp_size": 2}}),
        ("adapted mixtral", {"expert": 2}, {"options": {"expert": 2}, "readers": 2}),
        ("mixtral", {"tensor": 2}, {"sizes": {"tp_size": 2}}),
        ("mixtral", {"context": 2}, {"sizes": {"sp_size": 2}}),
        (
            "mixtral",
            {"tensor": 2, "expert": 2},
            {"options": {"tensor": 2, "expert": 2}},
        ),
        ("balanced", {"expert": 2}, {"options": {"expert": 2}, "readers": 2}),
        pytest.param(
            "mixtral",
            {"context": 2, "expert": 2},
            {"options": {"context": 2, "expert": 2}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_its_curve_is_that_of_one_process(
    model: str,
    dimensions: dict[str, int],
    asked: dict[str, Any],
    folder: Path,
    tmp_path: Path,
) -> None:
    """Also after an evaluation in the middle; one process goes on from its checkpoint. Samples that
    ranks share are counted once."""
    expected, out = alone(folder, model), str(tmp_path / "mesh")
    along = [dimensions.get(name, 1) for name in ("tensor", "context")]
    padded = LENGTH + -LENGTH % along[1]
    for seen in mesh(2, **dimensions).run(train, folder=out, **MODELS[model], **asked):
        assert_alike(seen, expected)
        torch.testing.assert_close(seen["saved"], expected["saved"], rtol=1e-3, atol=1e-5)
        assert seen["counted"] == expected["counted"]
        assert seen["tokens"] == 5 * 8 * padded
        assert [seen["shared by"][0], max(seen["shared by"][1:])] == along
    again = Subject("cpu").run(train, folder=out, resume=f"{out}/checkpoint-3", **MODELS[model])
    assert_alike(again[0], expected)


@pytest.mark.parametrize(
    ("trainer", "said"),
    [("OfMeans", "a sum over positions"), ("WithoutPositions", "must know its positions")],
)
def test_a_loss_that_parts_do_not_add_up_to_is_refused(
    trainer: str, said: str, tmp_path: Path
) -> None:
    """Before the first update."""
    with pytest.raises(WorkerFailure, match=said):
        mesh(2, context=2).run(
            train, trainer=trainer, folder=str(tmp_path), sizes={"cp_size": 2}, alone=True,
            model={"initializer_range": 0.5},  # or attention hardly tells positions apart
        )  # fmt: skip

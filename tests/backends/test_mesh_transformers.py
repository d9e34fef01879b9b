"""Models of transformers through compat's Trainer on meshes: the losses of one process, or a
refusal.
"""

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
    """Return the results of one process."""
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


sometimes = functools.partial(pytest.param, marks=pytest.mark.slow)

RECOMPUTED = {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}


@pytest.mark.row("X25")
@pytest.mark.parametrize(
    ("model", "dimensions", "asked"),
    [
        sometimes("llama", {"tensor": 2}, {"sizes": {"tp_size": 2}}),
        ("llama", {"context": 2}, {"sizes": {"cp_size": 2}}),
        sometimes("llama", {"context": 2}, {"sizes": {"cp_size": 2}, "given": RECOMPUTED}),
        sometimes("adapted llama", {"context": 2}, {"sizes": {"cp_size": 2}}),
        sometimes("adapted mixtral", {"expert": 2}, {"options": {"expert": 2}, "readers": 2}),
        sometimes("mixtral", {"tensor": 2}, {"sizes": {"tp_size": 2}}),
        sometimes("mixtral", {"context": 2}, {"sizes": {"sp_size": 2}}),
        sometimes("mixtral", {"tensor": 2, "expert": 2}, {"options": {"tensor": 2, "expert": 2}}),
        sometimes("balanced", {"expert": 2}, {"options": {"expert": 2}, "readers": 2}),
        ("llama", {"pipeline": 2}, {"options": {"pipeline": 2}}),
        sometimes("adapted mixtral", {"pipeline": 2}, {"options": {"pipeline": 2}, "says": False}),
        sometimes("mixtral", {"context": 2, "expert": 2}, {"options": {"context": 2, "expert": 2}}),
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
    """Compare with one process, with an evaluation in the middle. One process resumes from the
    mesh's checkpoint. Samples that ranks share count once.
    """
    expected, out = alone(folder, model), str(tmp_path / "mesh")
    along = [dimensions.get(name, 1) for name in ("tensor", "context")]
    padded = LENGTH + -LENGTH % along[1]
    for seen in mesh(2, **dimensions).run(train, folder=out, **MODELS[model], **asked):
        assert_alike(seen, expected)
        torch.testing.assert_close(seen["saved"], expected["saved"], rtol=1e-3, atol=1e-5)
        assert seen["counted"] == expected["counted"]
        assert seen["said"] == (expected["said"] if asked.get("says", True) else None)
        assert seen["tokens"] == 5 * 8 * padded
        assert [seen["shared by"][0], max(seen["shared by"][1:])] == along
    again = Subject("cpu").run(train, folder=out, resume=f"{out}/checkpoint-3", **MODELS[model])
    assert_alike(again[0], expected)


@pytest.mark.parametrize(
    ("dimensions", "changes", "said"),
    [
        # larger weights, or attention hardly depends on positions
        sometimes(
            {"context": 2},
            {"trainer": "OfMeans", "model": {"initializer_range": 0.5}},
            "a sum over positions",
        ),
        (
            {"context": 2},
            {"trainer": "WithoutPositions", "model": {"initializer_range": 0.5}},
            "be given the positions of each part",
        ),
        sometimes({"pipeline": 2}, MODELS["balanced"], "blocks keep them aside for the loss"),
    ],
    ids=str,
)
def test_a_loss_that_parts_do_not_add_up_to_is_refused(
    dimensions: dict[str, int], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Require the refusal before the first update."""
    with pytest.raises(WorkerFailure, match=said):
        mesh(2, **dimensions).run(
            train, folder=str(tmp_path), options=dimensions, alone=True, **changes
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dimensions", "changes", "said"),
    [
        ({"tensor": 2}, {"kind": "gpt2"}, "GPT2LMHeadModel has no tp_plan"),
        ({"pipeline": 2}, {"cached": True}, "Call generate with use_cache=False"),
        ({"pipeline": 2}, {"model": {"adapter": True}}, "whose base model it calls. Call the"),
    ],
    ids=str,
)
def test_what_cannot_be_partitioned_is_refused_by_name(
    dimensions: dict[str, int], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailure, match=said):
        mesh(2, **dimensions).run(
            train, folder=str(tmp_path), options=dimensions, alone=True, **changes
        )


@pytest.mark.parametrize("dimensions", [{"context": 2}, sometimes({"tensor": 2})], ids=str)
def test_a_training_step_of_ones_own(
    dimensions: dict[str, int], folder: Path, tmp_path: Path
) -> None:
    """Train with an overridden step. It may prepare batches, so the layers are not compared
    beforehand.
    """
    changes = {"trainer": "OwnStep", "options": dimensions}
    for seen in mesh(2, **dimensions).run(train, folder=str(tmp_path), **changes):
        torch.testing.assert_close(
            seen["losses"], alone(folder, "llama")["losses"], rtol=1e-5, atol=0
        )

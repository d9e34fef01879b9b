"""Experts that are partitioned over ranks learn as in one process, or are refused by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import mesh_mixture
import pytest
import torch
from few_cases import only_quick
from mesh_decoder import assert_alike, assert_near, assert_resumed, mesh
from mesh_mixture import IN_SEQUENCE, of_transformers, train

from drivetrain import Parallel
from drivetrain.backends.mesh.shape import MeshOptions, Shape
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError, SettingError


@functools.cache
def alone(**arguments: Any) -> dict[str, Any]:
    """Return the results of one process."""
    return Subject("cpu").run(train, **arguments)[0]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["Layer", "Experts"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_activations_are_recomputed(part: str, tensor: int) -> None:
    """Require that tokens are sent again when their experts are recomputed."""
    settings = {"activation_checkpointing": [part]}
    assert_alike(mesh(2, expert=2, tensor=tensor).run(train, settings=settings)[0], alone())


@pytest.mark.slow
def test_what_is_around_experts_is_compiled() -> None:
    compiled = {"compile": True, "compile_options": {"backend": "aot_eager"}}
    assert_alike(mesh(2, expert=2).run(train, settings=compiled)[0], alone())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"reshard_after_backward": False},
        {"sync_each_microbatch": True},
        {"cpu_offload": True},
        {"optimizer_step": "whole"},
        {"min_unit_params": 1},
        {"tensor": 2, "sync_each_microbatch": True},
        {"tensor": 2, "cpu_offload": True},
        {"tensor": 2, "optimizer_step": "whole"},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    for seen in Subject("mesh", 4, {"expert": 2, **options}).run(train):
        assert_alike(seen, alone())


@pytest.mark.slow
def test_experts_may_compute_in_groups() -> None:
    assert_alike(mesh(3, expert=3).run(train, kind="InGroups")[0], alone())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_mixed_precision(precision: str, tensor: int) -> None:
    seen, _ = mesh(2, expert=2, tensor=tensor).run(train, settings={"precision": precision})
    assert_near(seen["curve"], alone()["curve"], precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dimensions", "plan", "fault"),
    [
        (2, {"expert": 2}, "plain", "averaged as others"),
        (4, {"expert": 2, "tensor": 4}, "plain", "averaged as others"),
        (2, {"expert": 2}, "plain", "answers in another order"),
        (3, {"expert": 3}, "plain", "nothing in place of nothing"),
        (2, {"expert": 2, "tensor": 2}, "plain", "gradients joined as if each rank had all"),
        (2, {"expert": 2, "tensor": 2}, "in sequence", "gradients of parts of positions apart"),
    ],
)
def test_a_planted_fault_is_seen(
    size: int, dimensions: dict[str, int], plan: str, fault: str
) -> None:
    """Require another curve, norm or weights, or a failed run."""
    model = {"routed": plan == "plain"}
    settings = {"timeout_seconds": 10}

    def run() -> None:
        first, *_ = mesh(size, **dimensions).run(
            train, alone=True, plan=plan, fault=fault, settings=settings, **model
        )
        assert_alike(first, alone(**model))

    with pytest.raises((AssertionError, WorkerFailure)):
        run()


@pytest.mark.parametrize(
    ("size", "dimensions", "name", "how"),
    [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in [
            (2, {"expert": 2, "tensor": 2}, "Qwen3Moe", "eager"),
            (2, {"expert": 2}, "Mixtral", "eager"),
            (2, {"expert": 2}, "Mixtral", "grouped_mm"),
            (2, {"tensor": 2}, "Mixtral", "eager"),
            (2, {"expert": 2, "tensor": 2}, "Mixtral", "eager"),
            (4, {"expert": 2, "pipeline": 2}, "Mixtral", "eager"),
        ]
    ],
)
def test_a_mixture_of_transformers_is_partitioned(
    size: int, dimensions: dict[str, int], name: str, how: str
) -> None:
    """Compare with one process. transformers stacks its experts, and calls them as this driver
    needs; its own plan partitions the layers.
    """
    (one,) = Subject("cpu").run(of_transformers, name=name)
    for seen in mesh(size, **dimensions).run(of_transformers, name=name, how=how):
        assert_alike(seen, one)


LAYOUTS = {
    "cpu": Subject("cpu"),
    "expert 2": mesh(2, expert=2),
    "fsdp 2": Subject("fsdp", 2),
    "expert 3": mesh(3, expert=3),
    "expert 2 of 4": mesh(4, expert=2),
    "expert 2 x tensor 2": mesh(2, expert=2, tensor=2),
    "expert 2 x tensor 2 x pipeline 2": mesh(4, expert=2, tensor=2, pipeline=2),
}
ALWAYS = [
    ("expert 2", "expert 2 x tensor 2"),
    ("expert 2 x tensor 2 x pipeline 2", "cpu"),
]


@pytest.mark.parametrize(
    ("first", "then"),
    only_quick(((a, b) for a in LAYOUTS for b in LAYOUTS if "expert" in a + b), ALWAYS),
)
def test_any_layout_resumes_any_other(first: str, then: str, tmp_path: Path) -> None:
    whole = alone(routed=False)
    assert_resumed(mesh_mixture, LAYOUTS[first], LAYOUTS[then], 2, whole, tmp_path, routed=False)


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_experts_that_no_rank_ever_held_whole(dimensions: dict[str, int], tmp_path: Path) -> None:
    """Resume experts from a checkpoint, on ranks that build the model on the meta device."""
    out, whole = str(tmp_path / "run"), alone(routed=False)
    Subject("cpu").run(train, steps=2, out=out, routed=False)
    source = f"{out}/checkpoints/checkpoint-000002"
    on_meta = Subject("mesh", 4, {"expert": 2, "meta": True, **dimensions})
    resumed = on_meta.run(train, resume=source, routed=False)[0]
    torch.testing.assert_close(resumed["curve"], whole["curve"][2:], rtol=1e-5, atol=0)


# --- silent faults are refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "arguments", "said"),
    [
        (2, {"kind": "Normalising"}, "Experts must treat each token by itself"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (2, {"experts": []}, "does not say which modules hold experts"),
                (2, {"experts": ["blocks.*"]}, "'blocks.\\*', which fits no submodule"),
                (2, {"experts": ["layers.*"]}, "they must be stacked"),
                (2, {"kind": "Apart"}, "they must be stacked"),
                (2, {"kind": "Unweighted"}, "were called with shapes"),
                (4, {}, "backend.expert=4 does not divide the 6 experts .*expert=3 would do"),
            ]
        ),
    ],
    ids=str,
)
def test_what_cannot_be_partitioned_is_refused(
    size: int, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(WorkerFailure, match=said):
        mesh(size, expert=size).run(train, alone=True, **arguments)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"activation_checkpointing": ["Layer"]}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(
            {"compile": True, "compile_options": {"backend": "aot_eager"}}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_loss_of_a_part_of_the_positions_is_refused(settings: dict[str, Any]) -> None:
    """Require the refusal without a comparison, as for large models. The gradient would be right,
    and the reported loss wrong.
    """
    with pytest.raises(WorkerFailure, match="is added to the loss, such as an auxiliary loss"):
        mesh(2, tensor=2, check=False).run(train, alone=True, plan="in sequence", settings=settings)


ROUTER_WHOLE = {name: how for name, how in IN_SEQUENCE.items() if "router" not in name}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dimensions", "arguments", "said"),
    [
        (2, {"tensor": 2}, {"plan": "in sequence"}, "such as an auxiliary loss of routers"),
        (2, {"tensor": 2}, {"tensor": ROUTER_WHOLE, "routed": False}, "router.weight differ"),
        (4, {"pipeline": 2}, {}, "layers.0.router.weight past the blocks of the last stage"),
    ],
    ids=str,
)
def test_what_routers_cannot_have_is_refused(
    size: int, dimensions: dict[str, int], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(WorkerFailure, match=said):
        mesh(size, expert=2, **dimensions).run(train, alone=True, **arguments)


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ({"expert": 3}, 4, "must divide the 4 ranks .* set backend.expert=2"),
        ({"expert": 4, "replicate": 2}, 4, "must divide the 2 ranks .* set backend.expert=2"),
        ({"expert": 3, "tensor": 2}, 4, r"4 ranks .*shard 2 x context 1 x tensor 2.*expert=2"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(options: dict[str, int], size: int, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Shape.of(MeshOptions(**options), size)


def test_experts_are_named_in_a_list() -> None:
    with pytest.raises(RecipeError, match=r"must be a list: \['layers"):
        Parallel(experts="layers.*.experts")

"""Pipelines of the mesh driver: the curve of one process, checkpoints of any layout, refusals."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import mesh_decoder
import pytest
import torch
from few_cases import only_quick
from mesh_decoder import assert_alike, assert_near, assert_resumed, draws, held, mesh, train
from torch import nn

from drivetrain.backends.mesh.driver import driver
from drivetrain.backends.mesh.shape import MeshOptions, Shape
from drivetrain.backends.mesh.stages import StageForward, Stages
from drivetrain.conformance import Case, cases
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import CapabilityRefused, RecipeError, SettingError
from drivetrain.kernel.plan import Plan

WITH_TENSOR = {"pipeline": 2, "tensor": 2}
"""Stages whose layers are partitioned, on four ranks."""
IN_PARTS = {"pipeline": 2, "context": 2}
"""Stages that compute on parts of sequences."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(c, id=str(c)) for c in cases("mesh", options={"pipeline": 2})),
        *(
            pytest.param(c, id=f"tensor {c}")
            for c in cases("mesh", num_processes=4, options=WITH_TENSOR)
        ),
    ],
)
def test_laws(case: Case) -> None:
    case.check()


@functools.cache
def alone(layers: int = 2, **settings: Any) -> dict[str, Any]:
    """Return the results of one process."""
    return Subject("cpu").run(train, layers=layers, settings=settings)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 5},  # 5, 5 and 2 samples
        {"micro_batch": 12},  # one for two stages
        {"activation_checkpointing": ["Block"]},
        {"backend.meta": True, "micro_batch": 4},
    ],
    ids=str,
)
def test_any_microbatches(settings: dict[str, Any]) -> None:
    reported = {name: value for name, value in settings.items() if not name.startswith("backend.")}
    options = {n.removeprefix("backend."): v for n, v in settings.items() if n not in reported}
    if options:  # it begins with other weights
        expected = mesh(2, **options).run(train, settings=reported)[0]
    else:
        expected = alone(**{k: v for k, v in reported.items() if k == "micro_batch"})
    for seen in mesh(2, pipeline=2, **options).run(train, settings=reported):
        assert_alike(seen, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("micro_batch", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_noise_of_a_loss_is_the_same_in_all_stages(own_step: bool, micro_batch: int) -> None:
    """Require equal draws in the loss of all stages: the first computes with them, the last
    compares with them. Draws of blocks differ.
    """
    settings = {"micro_batch": micro_batch}
    first, last = mesh(2, pipeline=2).run(
        draws, settings=settings, own_step=own_step, compare=False
    )
    assert first["loss"] == last["loss"]
    assert len({drawn for _, drawn in first["loss"]}) > 6  # updates
    assert not {*first["block"]} & {*last["block"]}


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["tensor", "context"])
@pytest.mark.parametrize(
    "settings", [{"micro_batch": 5}, {"activation_checkpointing": ["Block"]}, {"micro_batch": 12}]
)
def test_any_microbatches_of_partitioned_stages(inner: str, settings: dict[str, Any]) -> None:
    expected = alone(**{k: v for k, v in settings.items() if k == "micro_batch"})
    plan = "in sequence" if inner == "tensor" else "plain"
    for seen in mesh(4, pipeline=2, **{inner: 2}).run(train, plan=plan, settings=settings):
        assert_alike(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [3, 1])
def test_heads_that_do_not_divide_gather_keys_and_values_in_each_stage(heads: int) -> None:
    expected = Subject("cpu").run(train, heads=heads)[0]
    for seen in mesh(4, pipeline=2, context=2).run(train, heads=heads):
        assert_alike(seen, expected)


@pytest.mark.slow
def test_partitioned_layers_may_begin_without_memory() -> None:
    expected = mesh(2, meta=True).run(train)[0]
    for seen in mesh(4, meta=True, **WITH_TENSOR).run(train):
        assert_alike(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["in sequence", "logits"])
def test_nothing_needs_to_be_tied(plan: str) -> None:
    """Compare with one process. A rank whose stage lacks the embedding or the head partitions a
    placeholder of it.
    """
    expected = Subject("cpu").run(train, tied=False)[0]
    arguments = {"plan": plan, "lossy": "of_parts" if plan == "logits" else "loss"}
    for seen in mesh(4, **WITH_TENSOR).run(train, tied=False, **arguments):
        assert_alike(seen, expected)


@pytest.mark.slow
def test_tied_weights_that_are_apart_are_refused() -> None:
    with pytest.raises(
        WorkerFailure, match=r"gradients differ of 1 weights, such as embed\.weight"
    ):
        mesh(4, **WITH_TENSOR).run(held, alone=True, plan="in sequence", fault="tied weights apart")


@pytest.mark.slow
def test_copies_stay_equal_bit_for_bit() -> None:
    """Compare the copies that several ranks hold after training: normalisations, on all ranks of a
    stage, and the embedding tied to the head, on the first stage and the last. No rank holds blocks
    of another stage in memory.
    """
    ranks = mesh(4, **WITH_TENSOR).run(held, plan="in sequence")
    copies: dict[Any, list[torch.Tensor]] = {}
    for rank in ranks:
        for name, at in rank.items():
            copies.setdefault((name, *at["start"]), []).append(at["part"])
    assert {len(parts) for parts in copies.values()} == {1, 2}
    assert [len(p) for (name, *_), p in copies.items() if name == "embed.weight"] == [2, 2]
    same = [torch.equal(first, other) for first, *others in copies.values() for other in others]
    assert all(same)
    for rank, block in zip(ranks, ["blocks.0", "blocks.0", "blocks.1", "blocks.1"], strict=True):
        assert {name[:8] for name in rank if name.startswith("blocks")} == {block}


@pytest.mark.slow
def test_a_step_of_ones_own_may_call_the_module_twice() -> None:
    """Compare with one process; microbatches go one after the other."""
    for seen in mesh(4, pipeline=2).run(train, own_step=True, lossy="twice"):
        assert_alike(seen, alone())


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [{"pipeline": 2}, WITH_TENSOR, IN_PARTS], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str, dimensions: dict[str, int]) -> None:
    subject = mesh(math.prod(dimensions.values()), **dimensions)
    seen, *_ = subject.run(train, settings={"precision": precision})
    assert_near(seen["curve"], alone()["curve"], precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "divided by microbatches",
        "tied weights apart",
        "tied weights counted by each",
        "stale rows",
        "losses reduced over all ranks",
        "each rank reads its own samples",
        "items counted by each rank",
    ],
)
def test_a_planted_fault_is_seen(fault: str) -> None:
    """Require another curve, norm or weights, or a failed run."""

    def run() -> None:
        settings = {"micro_batch": 5}
        seen = mesh(2, pipeline=2).run(train, alone=True, settings=settings, fault=fault)
        for each in seen:
            assert_alike(each, alone(micro_batch=5))

    with pytest.raises((AssertionError, WorkerFailure)):
        run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dimensions", "plan", "fault"),
    [
        (WITH_TENSOR, "plain", "weights untied"),
        (WITH_TENSOR, "plain", "fused layers partitioned as one"),
        (WITH_TENSOR, "plain", "one divisor for all norms"),
        (WITH_TENSOR, "plain", "tied weights counted by each"),
        (WITH_TENSOR, "plain", "items counted by each rank"),
        (WITH_TENSOR, "plain", "each rank reads its own samples"),
        (WITH_TENSOR, "in sequence", "a normalisation left out"),
        (IN_PARTS, "plain", "exchanged twice"),
        (IN_PARTS, "plain", "tied weights apart"),
        (IN_PARTS, "plain", "each rank reads its own samples"),
    ],
)
def test_a_fault_of_partitioned_stages_is_seen(
    dimensions: dict[str, int], plan: str, fault: str
) -> None:
    def run() -> None:
        for seen in mesh(4, **dimensions).run(train, alone=True, plan=plan, fault=fault):
            assert_alike(seen, alone())

    with pytest.raises((AssertionError, WorkerFailure)):
        run()


@pytest.mark.slow
def test_a_process_may_train_on_one_mesh_after_the_other(tmp_path: Path) -> None:
    """Train on two meshes in turn. Both have groups of the same ranks and names, but not the same
    groups.
    """
    for turn, dimensions in enumerate((WITH_TENSOR, {"tensor": 2}, WITH_TENSOR)):
        for seen in mesh(4, **dimensions).run(train, out=str(tmp_path / str(turn))):
            assert_alike(seen, alone())


LAYOUTS = {
    "cpu": Subject("cpu"),
    "fsdp 2": Subject("fsdp", 2),
    "tensor 2": mesh(2, tensor=2),
    "pipeline 2": mesh(2, pipeline=2),
    "pipeline 2 x shard 2": mesh(4, pipeline=2),
    "pipeline 2 x tensor 2": mesh(4, **WITH_TENSOR),
    "pipeline 2 x tensor 2 x shard 2": mesh(8, **WITH_TENSOR),
    "pipeline 2 x context 2": mesh(4, **IN_PARTS),
}
PAIRS = [
    ("pipeline 2", "cpu"),
    ("cpu", "pipeline 2"),
    ("pipeline 2", "fsdp 2"),
    ("fsdp 2", "pipeline 2"),
    ("pipeline 2", "pipeline 2"),
    ("pipeline 2 x shard 2", "tensor 2"),
    ("tensor 2", "pipeline 2 x shard 2"),
    ("pipeline 2 x shard 2", "pipeline 2"),
    ("pipeline 2 x tensor 2", "cpu"),
    ("cpu", "pipeline 2 x tensor 2"),
    ("pipeline 2 x tensor 2", "fsdp 2"),
    ("tensor 2", "pipeline 2 x tensor 2"),
    ("pipeline 2", "pipeline 2 x tensor 2"),
    ("pipeline 2 x tensor 2", "pipeline 2 x shard 2"),
    ("pipeline 2 x tensor 2", "pipeline 2 x tensor 2 x shard 2"),
    ("pipeline 2 x tensor 2 x shard 2", "tensor 2"),
    ("pipeline 2 x context 2", "cpu"),
    ("fsdp 2", "pipeline 2 x context 2"),
    ("pipeline 2 x context 2", "pipeline 2 x tensor 2"),
]


@pytest.mark.parametrize(("first", "then"), only_quick(PAIRS, PAIRS[:1]))
def test_any_layout_resumes_any_other(first: str, then: str, tmp_path: Path) -> None:
    assert_resumed(mesh_decoder, LAYOUTS[first], LAYOUTS[then], 3, alone(), tmp_path)


# --- silent faults are refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync_batch_norm": True}, "Set backend.sync_batch_norm=false"),
        ({"stages_per_rank": 2}, "Set backend.schedule=interleaved"),
        ({"stages_per_rank": 1, "schedule": "interleaved"}, "Set backend.schedule=1f1b"),
        ({"stages_per_rank": 0}, "backend.stages_per_rank"),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_pipeline_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        MeshOptions(pipeline=2, **options)


def test_ranks_that_a_pipeline_does_not_divide_are_refused() -> None:
    with pytest.raises(SettingError, match=r"pipeline 3 .* a multiple of 3 ranks, and there are 4"):
        Shape.of(MeshOptions(pipeline=3), 4)


@pytest.mark.parametrize(
    ("patterns", "number", "said"),
    [
        (["layers.*"], 2, "Parallel.stages names 'layers.*', which fits no submodule: the nearest"),
        (["0"], 2, r"names 1: set backend.pipeline so that there are at most 1"),
        ([], 2, "the model has no repeated ones"),
    ],
)
def test_blocks_that_are_too_few_are_refused(patterns: list[str], number: int, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Stages(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), patterns, number)


def test_blocks_are_partitioned_by_their_weights() -> None:
    """Require that the costliest stage costs as little as possible. Layers outside of blocks count
    for the block before them.
    """
    model = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in [(1, 8), (8, 1), (1, 2)]))
    model.append(nn.Linear(2, 40, bias=False))
    assert Stages(model, ["[012]"], 2).starts == [0, 2]
    assert Stages(model, ["[012]"], 3).starts == [0, 1, 2]
    assert Stages(model, ["?"], 2).of == {
        "0.weight": 0, "1.weight": 0, "2.weight": 0, "3.weight": 1,
    }  # fmt: skip


class Row(nn.Module):
    """A row of blocks, called in a given order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.order = order

    def forward(self, x: Any) -> Any:
        for index in self.order:
            x = self.blocks[int(index)](x)
        return x


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


@pytest.mark.parametrize(
    ("order", "stage", "said"),
    [
        ("01", 1, "has not called 'blocks.2'"),
        ("021", 1, "has called 'blocks.2' where 'blocks.1' was due"),
        ("0112", 1, "has called 'blocks.1' where 'blocks.2' was due"),
        ("01220", 1, "has called 'blocks.2' where the end was due"),
        ("0", 0, "has not called 'blocks.1'"),
    ],
)
def test_blocks_must_be_called_in_their_order(order: str, stage: int, said: str) -> None:
    module = Row(order)
    stages = Stages(module, ["blocks.?"], 2)
    assert stages.starts == [0, 1]
    run = StageForward(module, stages, [stage]).run
    with pytest.raises(RecipeError, match=said):
        run(stage, torch.ones(1, 2), module.forward, torch.ones(1, 2))


def test_what_a_hook_changes_is_changed_once() -> None:
    """Run a hook of the block where a stage begins. It must not run in the stage before, which ends
    there.
    """
    module = Row("012")
    module.blocks[1].register_forward_pre_hook(lambda block, args: (2 * args[0],))
    given, expected = torch.ones(1, 2), module(torch.ones(1, 2))
    stages = Stages(module, ["blocks.?"], 2)
    run = StageForward(module, stages, [0, 1]).run
    made = run(0, None, module.forward, given)
    assert torch.equal(run(1, made, module.forward, given), expected)


def test_a_stage_hands_tensors_on() -> None:
    module = Row("012")
    module.blocks[0] = Pair(2, 2)
    stages = Stages(module, ["blocks.?"], 2)
    with pytest.raises(RecipeError, match=r"'blocks.0' returns tuple: a stage sends one"):
        StageForward(module, stages, [0]).run(0, None, module.forward, torch.ones(1, 2))


def test_an_old_torch_is_refused_before_a_process_group_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(CapabilityRefused, match=r"torch 2.8.0, .* or set backend.pipeline=1"),
        driver.open(Plan(options=MeshOptions(pipeline=2))),
    ):
        pass
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lossy": "twice"}, "recipe.loss calls the module more than once"),
        ({"stages": ["blocks.*.norm1"]}, "past the blocks of the last stage"),
        ({"stages": ["blocks.*.up"]}, "where Parallel.stages names parts of blocks"),
    ],
    ids=str,
)
def test_what_cannot_be_partitioned_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkerFailure, match=said):
        mesh(2, pipeline=2).run(train, alone=True, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dimensions", "arguments", "said"),
    [
        (
            WITH_TENSOR,
            {"fused": {}},
            "pipeline=2 and backend.tensor=2 the loss .* in Parallel.fused",
        ),
        (WITH_TENSOR, {"tensor": {}}, "does not say how layers are partitioned"),
        (WITH_TENSOR, {"plan": "logits", "lossy": "by_hand"}, "partition the head by 'vocabulary'"),
        (IN_PARTS, {"lossy": "forgets_positions"}, "be given the positions of each part"),
        (IN_PARTS, {"lossy": "mean"}, "a sum over positions"),
        (IN_PARTS, {"length": 7}, "pad them to 8"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_into_stages_is_refused(
    dimensions: dict[str, int], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(WorkerFailure, match=said):
        mesh(4, **dimensions).run(train, alone=True, **arguments)

"""The mesh driver keeps the laws. Meshes have the curve of one process, or are refused by name."""

from __future__ import annotations

import functools
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any, cast

import mesh_decoder
import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from mesh_decoder import assert_alike, assert_near, assert_resumed, mesh, parts, train
from mesh_llama import train as llama
from quick_cases import is_quick

from drivetrain import Models, Parallel, Recipe, Turns
from drivetrain.backends.mesh.driver import driver
from drivetrain.backends.mesh.one_layer import layer_of
from drivetrain.backends.mesh.shape import MeshOptions, Shape
from drivetrain.conformance import Case, cases
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.state import assemble
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import CapabilityRefused, RecipeError, SettingError
from drivetrain.kernel.plan import Plan
from drivetrain.registry import refuse_unpromised
from drivetrain.trainer.fit import fit

ALWAYS = {
    "tensor": ("1_", "2_", "6_resume"),
    "context": ("1_gradient-plain_sgd",),
    "expert": ("1_gradient-plain_sgd",),
    "replicate": (),
    "shard": (),
}
"""Laws that run without the slow tests, too, by dimension: those on the gradient, its norm and
checkpoints. In all others a mesh works as `fsdp` does.
"""
SHOWN_BELOW = ("6_resume-checkpoints_move_between_drivers_and_worlds",)
"""The laws of these that `test_any_layout_resumes_any_other` shows."""


def is_quick_on_mesh(case: Case, laws: tuple[str, ...]) -> bool:
    """Return True for a quick case of these laws. A loss is scaled as `fsdp` does it."""
    name, is_scaled = str(case), case.arguments.get("precision") == "fp16"
    chosen = name.startswith(laws) and not name.startswith(SHOWN_BELOW)
    return chosen and is_quick(case) and not is_scaled


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c, id=f"{name}-{c}", marks=() if is_quick_on_mesh(c, laws) else pytest.mark.slow
        )
        for name, laws in {**ALWAYS, "tensor expert": ()}.items()
        for c in cases("mesh", num_processes=2, options=dict.fromkeys(name.split(), 2))
    ],
)
def test_laws(case: Case) -> None:
    case.check()


AFTER_ANOTHER = "6_average-averages_are_those_of_plain_torch"
"""A law in which one mesh follows another in a process, and both partition an embedding."""


@pytest.mark.usefixtures("environment_of_all")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c,
            id=f"{name}-{c}",
            marks=() if (name == "tensor" and AFTER_ANOTHER in str(c)) else pytest.mark.slow,
        )
        for name in ALWAYS
        for c in cases("mesh", options={name: 2}, python=python_of_all())
    ],
)
def test_laws_with_the_oldest_torch(case: Case) -> None:
    """Require the laws, or a refusal where this torch is too old."""
    case.check()


@pytest.mark.slow
@pytest.mark.usefixtures("environment_of_all")
def test_pipelines_are_refused_with_the_oldest_torch() -> None:
    old = Subject("mesh", options={"pipeline": 2}, num_processes=2, python=python_of_all())
    with pytest.raises(WorkerFailure, match=r"refuses backend\.pipeline=2: this is torch 2\.8"):
        old.run(train)


@functools.cache
def alone(**arguments: Any) -> dict[str, Any]:
    """Return the results of one process."""
    return Subject("cpu").run(train, **arguments)[0]


@pytest.mark.parametrize("heads", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_heads_that_do_not_divide_gather_keys_and_values(heads: int) -> None:
    assert_alike(mesh(2, context=2).run(train, heads=heads)[0], alone(heads=heads))


@pytest.mark.parametrize(
    "dimensions", [pytest.param({"context": 2}, marks=pytest.mark.slow), {"tensor": 2}], ids=str
)
def test_activations_are_recomputed(dimensions: dict[str, int]) -> None:
    """Compare with one process. Recomputed attention, too, sees whole sequences, and layers are
    partitioned.
    """
    settings = {"activation_checkpointing": ["Block"]}
    assert_alike(mesh(2, **dimensions).run(train, settings=settings)[0], alone())


@pytest.mark.parametrize(
    ("size", "dimensions", "plan"),
    [
        pytest.param(2, {"tensor": 2}, "in sequence", marks=pytest.mark.slow),
        pytest.param(4, {"tensor": 2}, "logits", marks=pytest.mark.slow),
        pytest.param(2, {"pipeline": 2}, "plain", marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2, "tensor": 2}, "in sequence", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_compute_the_same(size: int, dimensions: dict[str, int], plan: str) -> None:
    """Trace as the laws of `compile` do, without compiling to machine code."""
    compiled = {"compile": True, "compile_options": {"backend": "aot_eager"}}
    settings = {**compiled, "activation_checkpointing": ["Block"]}
    assert_alike(mesh(size, **dimensions).run(train, plan=plan, settings=settings)[0], alone())


def test_what_cannot_be_traced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Require refusals before there is a process group."""
    with pytest.raises(CapabilityRefused, match="refuses compile"):
        refuse_unpromised(driver, Plan(compile=True, options=MeshOptions(context=2)), 2)
    plan = Plan(compile=True, compile_options={"dynamic": True}, options=MeshOptions(tensor=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CapabilityRefused, match="compiled again for each shape"), driver.open(plan):
        pass
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    with pytest.raises(CapabilityRefused, match="refuses compile"):
        refuse_unpromised(driver, Plan(compile=True, options=MeshOptions(tensor=2)), 2)


@pytest.mark.parametrize(
    ("size", "options", "parallel", "message"),
    [
        (2, {"tensor": 2}, {"tensor": {"one": "column"}}, "fits no submodule: the nearest is 'on'"),
        (
            2,
            {"tensor": 2},
            {"tensor": {"on": "column", "o*": "row"}},
            "partitions 'on' in two ways",
        ),
        (4, {"tensor": 4}, {"tensor": {"on": "column"}}, "its 6 outputs; backend.tensor=3 would"),
        (4, {"expert": 4}, {"experts": ["on"]}, "the 6 experts of 'on'; backend.expert=3 would"),
        (2, {"pipeline": 2}, {"stages": ["on"]}, r"Parallel.stages=\['on'\] names 1"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused_before_ranks_meet(
    size: int,
    options: dict[str, int],
    parallel: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def meet(plan: Plan) -> None:
        raise AssertionError("ranks met")

    monkeypatch.setattr(driver, "open", meet)
    monkeypatch.setenv("WORLD_SIZE", str(size))
    recipe = Recipe(
        model=lambda: torch.nn.Sequential(OrderedDict(on=torch.nn.Linear(4, 6))),
        loss=lambda module, batch: module(batch).sum(),
        train_data=[torch.ones(4)] * 8,
        parallel=Parallel(**parallel),
    )
    with pytest.raises(RecipeError, match=message):
        fit(recipe, backend="mesh", backend_options=options)


def test_losses_that_take_turns_are_refused_whatever_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Require the refusal before the models are divided into stages, which would be impossible for
    this one.
    """
    monkeypatch.setenv("WORLD_SIZE", "4")
    recipe = Recipe(
        model=lambda: Models({"only": torch.nn.Linear(4, 6)}),
        loss=Turns({"only": lambda models, batch: models["only"](batch).sum()}),
        train_data=[torch.ones(4)] * 8,
    )
    with pytest.raises(CapabilityRefused, match="Turns"):
        fit(recipe, backend="mesh", backend_options={"pipeline": 2})


def test_a_loss_may_draw_random_numbers() -> None:
    """Require that the comparison of whole and partitioned layers draws the same numbers for both,
    and that the training draws those of one process.
    """
    assert_alike(mesh(2, tensor=2).run(train, lossy="noisy")[0], alone(lossy="noisy"))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_mixed_precision(precision: str) -> None:
    settings = {"precision": precision}
    for dimensions in ({"context": 2}, {"tensor": 2}):
        (seen, _), expected = mesh(2, **dimensions).run(train, settings=settings), alone()
        assert_near(seen["curve"], expected["curve"], precision)


@pytest.mark.slow  # tests/backends/test_mesh_transformers.py trains such models in each run
@pytest.mark.parametrize(
    "model", [{"tied": True}, {"tied": False}, {"tied": False, "adapter": True}], ids=str
)
def test_a_model_of_transformers_brings_its_plan(model: dict[str, bool], tmp_path: Path) -> None:
    """Train by compat's Trainer with `parallelism_config`: ranks of one layer see the same samples.
    Adapters around layers are saved whole.
    """
    (one,) = Subject("cpu").run(llama, folder=str(tmp_path / "one"), tp_size=1, **model)
    for seen in mesh(2, tensor=2).run(llama, folder=str(tmp_path / "two"), tp_size=2, **model):
        for name in ("losses", "norms", "evaluated"):
            torch.testing.assert_close(seen[name], one[name], rtol=1e-5, atol=0)
        assert seen["global batch"] == one["global batch"] == 8
        assert seen["saved"].keys() == one["saved"].keys()
        torch.testing.assert_close(seen["saved"], one["saved"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("plan", ["plain", pytest.param("in sequence", marks=pytest.mark.slow)])
def test_adapters_are_partitioned_as_the_layers_that_they_stand_for(plan: str) -> None:
    """Compare with one process, for adapters around fused layers, too."""
    seen, *_ = mesh(2, tensor=2).run(train, plan=plan, changed="adapted")
    assert_alike(seen, alone(changed="adapted"))


def stand_in(*sizes: int, **buffers: torch.Tensor) -> torch.nn.Module:
    """Return a module that replaces a layer of 8 inputs and 24 outputs, with another weight of
    these sizes.
    """
    module: Any = torch.nn.Module()
    module.in_features, module.out_features = 8, 24
    module.layer = torch.nn.Linear(8, 24)
    module.own = torch.nn.Parameter(torch.ones(sizes))
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return cast(torch.nn.Module, module)


def quantized(layer: torch.nn.Linear) -> torch.nn.Module:
    bits = torch.zeros(96, 1, dtype=torch.uint8)
    layer.weight = torch.nn.Parameter(bits, requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (stand_in(3, s=torch.ones(3)), r"'q' by 'column', which has buffers \(s\)"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), "is for Linear, and it is Sequential"),
        (quantized(torch.nn.Linear(8, 24)), r"\(96, 1\) of torch.uint8: quantized layers are not"),
        (stand_in(24, 24), r"of 24 outputs, whose own is \(24, 24\)"),
    ],
)
def test_what_stands_in_for_a_layer_is_refused(part: torch.nn.Module, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        layer_of("q", "column", part).check_order()


# --- silent faults are detected ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dimensions", "plan", "fault"),
    [
        ({"tensor": 2}, "plain", "each rank reads its own samples"),
        ({"context": 2}, "plain", "exchanged twice"),
        ({"tensor": 2}, "in sequence", "a normalisation left out"),
        *(
            pytest.param({"tensor": 2}, "plain", fault, marks=pytest.mark.slow)
            for fault in (
                "weights untied",
                "fused layers partitioned as one",
                "one divisor for all norms",
                "items counted by each rank",
                "losses reduced over all ranks",
            )
        ),
    ],
)
def test_a_planted_fault_is_seen(dimensions: dict[str, int], plan: str, fault: str) -> None:
    """Require another curve, norm or weights, or a failed run."""

    def run() -> None:
        first, *_ = mesh(2, **dimensions).run(train, alone=True, plan=plan, fault=fault)
        assert_alike(first, alone())

    with pytest.raises((AssertionError, WorkerFailure)):
        run()


@pytest.mark.parametrize(
    ("size", "fault"),
    [
        (4, ""),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((4, "sharded in another order"), (6, ""))
        ),
    ],
)
def test_what_is_saved_is_what_was_trained(size: int, fault: str, tmp_path: Path) -> None:
    """Compare stored and trained weights, also where 6 ranks partition one dimension twice,
    unevenly. Wrong boxes would join the parts wrongly.
    """
    out = str(tmp_path / "run")
    seen = mesh(size, tensor=2).run(
        train, alone=bool(fault), steps=1, out=out, fault=fault, compare=not fault
    )[0]
    source = f"{out}/checkpoints/checkpoint-000001"
    stored = assemble(Subject("cpu").run(parts, source=source))["weights"]
    same = [torch.equal(tensor, seen["weights"][name]) for name, tensor in stored.items()]
    assert all(same) is not bool(fault)


LAYOUTS = {
    "cpu": Subject("cpu"),
    "fsdp 2": Subject("fsdp", 2),
    "tensor 2": mesh(2, tensor=2),
    "context 2": mesh(2, context=2),
    "tensor 2 x shard 2": mesh(4, tensor=2),
}


QUICK = [("tensor 2", "context 2"), ("tensor 2 x shard 2", "cpu")]


@pytest.mark.parametrize(("first", "then"), only_quick(product(LAYOUTS, repeat=2), QUICK))
def test_any_layout_resumes_any_other(first: str, then: str, tmp_path: Path) -> None:
    assert_resumed(mesh_decoder, LAYOUTS[first], LAYOUTS[then], 3, alone(), tmp_path)


# --- silent faults are refused -------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("dimensions", "arguments", "said"),
    [
        ({"context": 2}, {"lossy": "forgets_positions"}, "be given the positions of each part"),
        ({"context": 2}, {"lossy": "mean"}, "a sum over positions"),
        ({"context": 2}, {"length": 7}, "pad them to 8"),
        ({"context": 2}, {"sequence": {}}, "does not say which dimension"),
        ({"context": 2}, {"sequence": {"words": 1}}, "Parallel.sequence names words"),
        ({"tensor": 2}, {"fused": {}}, "must be named in Parallel.fused"),
        ({"tensor": 2}, {"tensor": {}}, "does not say how layers are partitioned"),
        (
            {"tensor": 2},
            {"tensor": {"blocks.*.q": "row"}},
            r"the nearest is 'blocks...q",
        ),
        ({"tensor": 2}, {"tensor": {"norm": "row"}, "fused": {}}, "which is for Linear"),
        ({"tensor": 2}, {"tensor": {"blocks.*.up": "column"}, "fused": {"*.up": 5}}, "5 in one"),
        ({"tensor": 2}, {"tensor": {"*": "sequence", "head": "row"}}, "in two ways"),
        ({"tensor": 2}, {"tensor": {"blocks.*": "sequence"}}, "inside of .*: name one of them"),
        ({"tensor": 2}, {"changed": "scaled"}, "LoRA does not; DoRA does"),
        ({"tensor": 2}, {"tensor": {"embed": "vocabulary"}, "fused": {}}, "are one parameter"),
        ({"tensor": 2}, {"tensor": {"head": "sequence"}, "fused": {}}, "one by 'sequence'"),
    ],
    ids=str,
)
def test_what_cannot_be_partitioned_is_refused(
    dimensions: dict[str, int], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(WorkerFailure, match=said):
        mesh(2, **dimensions).run(train, alone=True, **arguments)


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ({"tensor": 3}, 4, "tensor 3 needs a multiple of 3 ranks, and there are 4: start 3"),
        ({"tensor": 2, "context": 2}, 6, "needs a multiple of 4 ranks, and there are 6: start 8"),
        ({"shard": 4}, 6, "shard 4 needs a multiple of 4 ranks, and there are 6: start 8"),
        (
            {"shard": 2, "replicate": 1},
            6,
            "shard 2 is a mesh of 2 ranks, and there are 6: start 2",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused(options: dict[str, int], size: int, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Shape.of(MeshOptions(**options), size)


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ({"tensor": 2}, 3, "3 ranks: with backend.tensor=2 it takes a multiple of 2: start 4"),
        ({"expert": 3}, 4, "4 ranks: with backend.expert=3 it takes a multiple of 3: start 3"),
        ({"context": 2, "tensor": 2}, 6, "backend.context=2 and backend.tensor=2 .* 4: start 8"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_before_they_are_started(
    options: dict[str, int], size: int, said: str
) -> None:
    with pytest.raises(CapabilityRefused, match=said):
        refuse_unpromised(driver, Plan(options=MeshOptions(**options)), size)


@pytest.mark.parametrize(
    ("options", "replicate", "shard"), [({}, 1, 4), ({"replicate": 2}, 2, 2), ({"shard": 2}, 2, 2)]
)
def test_a_dimension_without_a_size_takes_the_remaining_ranks(
    options: dict[str, int], replicate: int, shard: int
) -> None:
    shape = Shape.of(MeshOptions(context=2, **options), 8)
    assert (shape.replicate, shape.shard) == (replicate, shard)


def test_a_plan_says_how() -> None:
    with pytest.raises(RecipeError, match=r"'rows'; it may be column, row"):
        Parallel(tensor={"up": "rows"})  # type: ignore[dict-item]

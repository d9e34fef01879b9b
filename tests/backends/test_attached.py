"""Hooks and attributes on parameters: every driver obeys them, or refuses them by name."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from small_networks import SETTINGS, Blocks, copied
from torch import Tensor, nn

from drivetrain import Parallel, Recipe
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.events import Logged, StepEnded

DRIVERS = {
    "ddp": Subject("ddp", 2),
    "fsdp": Subject("fsdp", 2),
    "mesh-tensor": Subject("mesh", 2, {"tensor": 2}),
    "mesh-pipeline": Subject("mesh", 2, {"pipeline": 2}),
    "zero-2": Subject("deepspeed", 2, {"stage": 2}, python=python_of_all()),
    "zero-3": Subject("deepspeed", 2, {"stage": 3}, python=python_of_all()),
    "xla": Subject("xla", options={"devices": 1}, python=python_of_all()),
}
EACH = only_quick(DRIVERS, ("ddp", "fsdp", "mesh-tensor"))


def hooked() -> Blocks:
    made = Blocks()
    mask = torch.arange(4.0).reshape(4, 1).clamp(max=1.0)
    made.last.weight.register_hook(lambda grad: grad * mask.to(grad.device))
    return made


def hooked_in_a_block() -> Blocks:
    made = hooked()
    made.blocks[0].down.weight.register_hook(lambda grad: grad * 0.25)
    return made


def by_attribute(named: Any) -> torch.optim.Optimizer:
    """Build an optimizer whose weight decay is so strong that a lost attribute shows at once."""
    parameters = [parameter for _, parameter in named]
    marked = [hasattr(p, "_no_weight_decay") for p in parameters]
    groups = [
        {"params": [p for p, m in zip(parameters, marked, strict=True) if m is kept]}
        for kept in (False, True)
    ]
    groups[0]["weight_decay"] = 2.0
    return torch.optim.SGD(groups, lr=0.1)


def recipe(model: Any) -> Recipe:
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return Recipe(
        model,
        lambda module, batch: (module(batch) - batch.roll(1, 1)).square().sum(),
        list(data),
        optimizer=by_attribute,
        parallel=Parallel(tensor={"blocks.*.up": "column", "blocks.*.down": "row"}),
    )


def trained(bench: Bench, *, model: str) -> dict[str, Tensor]:
    """A job: return the trained weights."""
    weights: dict[str, Tensor] = bench.fit(recipe(globals()[model]), SETTINGS, finish=copied).finish
    return weights


@pytest.mark.parametrize("driver", only_quick(DRIVERS, ("ddp",)))
def test_attributes_and_linear_hooks_act_as_in_one_process(
    driver: str, request: pytest.FixtureRequest
) -> None:
    subject = DRIVERS[driver]
    if subject.python:
        request.getfixturevalue("environment_of_all")
    model = "hooked" if driver == "mesh-tensor" else "hooked_in_a_block"
    (alone,) = Subject("cpu").run(trained, model=model)
    for weights in subject.run(trained, model=model):
        for name, expected in alone.items():
            assert torch.allclose(weights[name], expected, atol=1e-6), name


def refusal(bench: Bench, *, model: str) -> str:
    """A job: return the message of a refusal before the first step."""
    try:
        bench.fit(recipe(globals()[model]), SETTINGS)
    except RecipeError as error:
        return str(error)
    return "nothing"


def test_a_hook_on_a_partitioned_weight_is_refused() -> None:
    for said in DRIVERS["mesh-tensor"].run(refusal, model="hooked_in_a_block"):
        assert "'blocks.0.down.weight'" in said and "recipe.parallel partitions" in said


def _clipped(grad: Tensor) -> Tensor:
    return grad * (0.5 / grad.norm()).clamp(max=1.0)


def _clamped_in_place(grad: Tensor) -> None:
    grad.clamp_(-1.0, 1.0)


def _halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("hook", "after"),
    [
        pytest.param(lambda grad: grad.clamp(-1, 1), False, id="clamp"),
        pytest.param(lambda grad: grad.sign(), False, id="sign"),
        pytest.param(_clipped, False, id="norm"),
        pytest.param(lambda grad: grad + torch.randn_like(grad), False, id="noise"),
        pytest.param(_clamped_in_place, False, id="in place"),
        pytest.param(_halved, True, id="after accumulation"),
    ],
)
def test_hooks_that_are_not_linear_are_refused(hook: Any, after: bool) -> None:
    """Require the refusal, except in one process with one microbatch, where hooks receive the whole
    gradient.
    """

    def model() -> Blocks:
        made = Blocks()
        weight = made.first.weight
        register = weight.register_post_accumulate_grad_hook if after else weight.register_hook
        register(hook)
        return made

    before = torch.get_rng_state()
    with pytest.raises(RecipeError, match=r"hook .* is registered on parameter 'first.weight'"):
        Bench("cpu", {}).fit(recipe(model), SETTINGS)
    assert Bench("cpu", {}).fit(recipe(model), {**SETTINGS, "micro_batch": None}).step == 3
    torch.set_rng_state(before)


def test_a_hook_that_looks_only_is_none_to_refuse() -> None:
    seen: list[float] = []

    def model() -> Blocks:
        made = Blocks()
        made.first.weight.register_hook(lambda grad: seen.append(float(grad.norm())))
        return made

    Bench("cpu", {}).fit(recipe(model), SETTINGS)
    assert len(seen) >= 12


built: list[Blocks] = []
CLIPPED = {**SETTINGS, "steps": 5, "max_grad_norm": 0.5}


def partly_frozen() -> Blocks:
    made = Blocks()
    made.first.requires_grad_(False)
    made.blocks[1].requires_grad_(False)
    built.append(made)
    return made


def thaw(event: Any) -> None:
    """An observer: unfreeze a layer of the root and a whole block after step 2."""
    if isinstance(event, StepEnded) and event.step == 2:
        built[-1].first.requires_grad_(True)
        built[-1].blocks[1].requires_grad_(True)


def all_of_them(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def thawed(bench: Bench) -> Any:
    """A job: return gradient norms and trained weights, or the message that refuses unfreezing."""
    norms: list[float] = []
    kept = dataclasses.replace(recipe(partly_frozen), optimizer=all_of_them)
    kept = dataclasses.replace(kept, train_data=list(kept.train_data) * 2)

    def observe(event: Any) -> None:
        thaw(event)
        if isinstance(event, Logged):
            norms.append(event.grad_norm)

    try:
        weights = bench.fit(
            kept, {**CLIPPED, "log_every": 1}, finish=copied, observers=[observe]
        ).finish
    except RecipeError as error:
        return str(error)
    return norms, weights


def thawed_by_hand() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = partly_frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = recipe(None)
    norms = []
    for step in range(5):
        batch = torch.stack([given.train_data[(8 * step + i) % 24] for i in range(8)])
        (given.loss(model, batch) / 8).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        thaw(StepEnded(step + 1))
    return norms, copied(model)


@pytest.mark.parametrize("driver", ["cpu", *EACH])
def test_what_is_thawed_in_a_run_learns_as_in_one_process_or_is_refused(
    driver: str, request: pytest.FixtureRequest
) -> None:
    subject = DRIVERS.get(driver, Subject(driver))
    if subject.python:
        request.getfixturevalue("environment_of_all")
    norms, weights = thawed_by_hand()
    for reported in subject.run(thawed):
        if driver.startswith("zero"):
            assert "first.weight" in reported and "requires_grad" in reported
            continue
        assert reported[0] == pytest.approx(norms, rel=1e-5)
        for name, expected in weights.items():
            assert torch.allclose(reported[1][name], expected, atol=1e-6), name


def test_what_the_optimizer_was_not_given_cannot_be_thawed() -> None:
    """Require a refusal: without one, the weight would silently never learn."""
    kept = dataclasses.replace(recipe(partly_frozen), optimizer=None)
    with pytest.raises(RecipeError, match=r"blocks\.1\.down\.bias.*no group of the optimizer"):
        Bench("cpu", {}).fit(kept, {**CLIPPED, "steps": 3}, observers=[thaw])


def past_the_wrapper(bench: Bench) -> str:
    """A job: return the message that refuses a loss which calls the module inside the wrapper."""

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        own: Any = getattr(module, "module", module)
        error: Tensor = Blocks.forward(own, batch) - batch.roll(1, 1)
        return error.square().sum()

    kept = dataclasses.replace(recipe(Blocks), loss=loss, parallel=Parallel())
    try:
        weights = bench.fit(kept, SETTINGS, finish=copied).finish
    except RecipeError as error:
        return str(error)
    return f"it was not refused: {weights}"


@pytest.mark.parametrize("driver", ["ddp", pytest.param("zero-3", marks=pytest.mark.slow)])
def test_a_loss_that_goes_past_the_wrapper_is_refused(
    driver: str, request: pytest.FixtureRequest
) -> None:
    if DRIVERS[driver].python:
        request.getfixturevalue("environment_of_all")
    for said in DRIVERS[driver].run(past_the_wrapper):
        assert "without calling the module that recipe.loss is given" in said


def normalised() -> Blocks:
    """Return a network with weight normalization, by both of torch's interfaces, and a backward
    hook on a block.
    """
    made = Blocks()
    nn.utils.parametrizations.weight_norm(made.blocks[0].up)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(made.blocks[1].up)
    nn.utils.parametrizations.weight_norm(made.last)
    made.blocks[1].register_full_backward_hook(_halves)
    return made


def _halves(module: nn.Module, given: Any, made: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in given)


@pytest.mark.parametrize("driver", EACH)
def test_weights_made_of_others_and_hooks_of_modules(
    driver: str, request: pytest.FixtureRequest
) -> None:
    subject = DRIVERS[driver]
    if subject.python:
        request.getfixturevalue("environment_of_all")
    if driver == "mesh-tensor":
        for said in subject.run(refusal, model="normalised"):
            assert "'blocks.0.up'" in said and "made of others" in said
        return
    (alone,) = Subject("cpu").run(trained, model="normalised")
    for weights in subject.run(trained, model="normalised"):
        for name, expected in alone.items():
            assert torch.allclose(weights[name], expected, atol=1e-6), name

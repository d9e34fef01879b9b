"""The first tensor that is not finite is named, and the search for it changes nothing."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import DataSettings, LossParts, Models, Recipe, Settings, Turns
from drivetrain.kernel.errors import NonFiniteTraining
from drivetrain.kernel.events import StepSkipped
from drivetrain.trainer.fit import fit
from drivetrain.trainer.nonfinite import NonFiniteFound
from drivetrain.trainer.setting_values import override

from .problems import everything

BAD = 21
"""The sample that is not finite: sample 1 of microbatch 1 in step 3."""
SETTINGS = Settings(
    steps=4, global_batch=8, micro_batch=4, data=DataSettings(shuffle=False), log_every=10
)
Operation = Callable[[Tensor, Tensor], Tensor]


class Sets(torch.autograd.Function):
    """An operation of the user's own that fails in its backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (bad,) = ctx.saved_tensors
        return gradients[0] / (1 - bad), None


class Hidden(torch.autograd.Function):
    """A function that computes past torch's operations."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return torch.tensor(inputs.tolist())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Act(nn.Module):
    """An activation `operation(x, bad)` in the middle of the model. `bad` is 1 for the sample that
    is not to be finite, else 0."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, inputs: Tensor, bad: Tensor) -> Tensor:
        return self.operation(inputs, bad)


class Model(nn.Module):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Act(operation)])
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: Tensor, bad: Tensor) -> Tensor:
        hidden = self.blocks[0](self.norm(self.first(inputs)).tanh())
        return self.last(self.blocks[1](hidden, bad))


def keep(inputs: Tensor, bad: Tensor) -> Tensor:
    return inputs


def squared(module: nn.Module, batch: dict[str, Any]) -> Tensor:
    return module(batch.pop("x"), batch["bad"]).square().sum()


def samples(value: float = 0.0) -> list[dict[str, Tensor]]:
    """Return the data; `value` is added to the input of the bad sample."""
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    inputs[BAD, 2] += value
    bad = torch.zeros(40, 1)
    bad[BAD] = 1
    return [{"x": x, "bad": b} for x, b in zip(inputs, bad, strict=True)]


def recipe(operation: Operation = keep, **parts: Any) -> Recipe:
    made = Recipe(model=lambda: Model(operation), loss=squared, train_data=samples())
    return dataclasses.replace(made, **parts)


def run(what: Recipe, **settings: Any) -> tuple[list[StepSkipped], list[NonFiniteFound]]:
    out = settings.pop("out", None)
    events: list[Any] = []
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    fit(what, override(SETTINGS, keys), backend="cpu", observers=[events.append], out=out)
    skipped = [event for event in events if isinstance(event, StepSkipped)]
    return skipped, [event for event in events if isinstance(event, NonFiniteFound)]


def line_of(function: Any) -> str:
    return f"test_nonfinite.py:{function.__code__.co_firstlineno}"


FORWARD: dict[str, tuple[Operation, str]] = {
    "the logarithm of a negative": (lambda x, bad: torch.log(2 - 9 * bad + 0 * x), "torch.log"),
    "its method": (lambda x, bad: (2 - 9 * bad + 0 * x).log(), "log"),
    "in place": (lambda x, bad: (2 - 9 * bad + 0 * x).log_(), "log_"),
    "a division by zero": (lambda x, bad: x / (1 - bad), "div"),
    "zero by zero": (lambda x, bad: (0 * x) / (1 - bad), "div"),
    "an exponential that overflows": (lambda x, bad: (x + 200 * bad).exp(), "exp"),
    "the root of a negative": (lambda x, bad: torch.sqrt(1 - 2 * bad + 0 * x), "torch.sqrt"),
    "one by the root of zero": (lambda x, bad: x * torch.rsqrt(1 - bad), "torch.rsqrt"),
    "a power of a negative": (lambda x, bad: (1 - 2 * bad + 0 * x) ** 0.5, "pow"),
    "an arc cosine": (lambda x, bad: torch.acos(3 * bad + 0 * x), "torch.acos"),
    "a square that overflows": (lambda x, bad: (x + 1e20 * bad) ** 2, "pow"),
    "a product that overflows": (lambda x, bad: x * (1 + 1e38 * bad) * 1e9, "mul"),
    "a softmax of nothing": (
        lambda x, bad: F.softmax(x.masked_fill(bad.bool(), -math.inf), -1),
        "softmax",
    ),
    "the difference of two infinities": (
        lambda x, bad: x - (inf := torch.where(bad.bool(), math.inf, 0.0)) + inf,
        "add",
    ),
    "a layer norm without an epsilon": (
        lambda x, bad: F.layer_norm(x * (1 - bad), (8,), eps=0.0),
        "layer_norm",
    ),
    "a number that is written": (lambda x, bad: write(x, bad, math.nan), "__setitem__"),
    "a function that torch does not show": (
        lambda x, bad: Hidden.apply(torch.log(2 - 9 * bad + 0 * x)),
        "torch.log",
    ),
    "a result that is written": (lambda x, bad: write(x, bad, 0 * bad[bad > 0] / 0), "div"),
}


def write(x: Tensor, bad: Tensor, value: Any) -> Tensor:
    x = x.clone()
    x[bad[:, 0] > 0, 3] = value
    return x


@pytest.mark.parametrize("name", FORWARD)
def test_an_operation_of_the_forward_is_named(name: str) -> None:
    operation, called = FORWARD[name]
    skipped, (found,) = run(recipe(operation))
    assert [event.step for event in skipped] == [3]
    assert (found.step, found.phase, found.module) == (3, "forward", "blocks.1"), found.text
    assert called.rpartition(".")[2].strip("_") in found.operation, found.text
    assert (found.rank, found.microbatch, found.sample) == (0, 1, 1), found.text
    assert found.data == f"sample {BAD} of epoch 0 ({BAD})"
    assert found.place.startswith("test_nonfinite.py:")


def log_in_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return torch.log(module(batch["x"], batch["bad"]).square() - 9e9 * batch["bad"]).sum()


def divergence_in_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.kl_div(module(batch["x"], batch["bad"]), 1 - 2 * batch["bad"], reduction="sum")


def error_in_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(module(batch["x"], batch["bad"]), batch["bad"] * 1e30, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "operation"),
    [(log_in_loss, "torch.log"), (divergence_in_loss, "kl_div"), (error_in_loss, "mse_loss")],
)
def test_an_operation_of_the_loss_is_named(loss: Any, operation: str) -> None:
    _, (found,) = run(recipe(loss=loss))
    assert operation in found.operation and found.module == "", found.text
    assert found.place == f"test_nonfinite.py:{loss.__code__.co_firstlineno + 1}"
    assert (found.microbatch, found.sample) == (1, 1), found.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_that_is_not_finite_is_named(value: float) -> None:
    _, (found,) = run(recipe(train_data=samples(value)))
    name = "NaN" if math.isnan(value) else "infinity"
    assert (found.tensor, found.values, found.sample) == ("batch['x']", name, 1)
    assert f"batch['x'] is the first {name}, in microbatch 1, sample 1" in found.text


def with_value(name: str, value: float) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Model(keep)
        with torch.no_grad():
            model.get_parameter(name)[0] = value
        return model

    return build


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named_and_the_run_ends_with_it(value: float) -> None:
    what = recipe(model=with_value("blocks.0.bias", value))
    with pytest.raises(NonFiniteTraining, match=r"the weight `blocks\.0\.bias`, as it was before"):
        run(what, max_nonfinite=2)


def test_a_buffer_that_is_not_finite_is_named() -> None:
    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scale = module.get_buffer("norm.running_mean").sum()
        return (module(batch["x"], batch["bad"]) + scale).square().sum()

    def build() -> nn.Module:
        model = Model(keep)
        model.norm.running_mean[0] = math.nan  # type: ignore[index]
        return model

    with pytest.raises(NonFiniteTraining, match=r"the buffer `norm\.running_mean`, as it"):
        run(recipe(model=build, loss=loss))


BACKWARD: dict[str, tuple[Operation, str]] = {
    "the root of zero": (lambda x, bad: torch.sqrt((x * (1 - bad)).square()), "sqrt"),
    "a power of zero": (lambda x, bad: (x * (1 - bad)).abs() ** 0.5, "pow"),
    "a norm by hand": (
        lambda x, bad: x + (x * (1 - bad)).square().sum(1, keepdim=True).sqrt(),
        "sqrt",
    ),
    "a branch that is not taken": (
        lambda x, bad: torch.where(bad > 0, 0.0, (x.square() * (1 - bad)).sqrt()),
        "sqrt",
    ),
    "an arc cosine of one": (
        lambda x, bad: torch.acos((x * (1 - bad)).clamp(-0.5, 0.5) + bad),
        "acos",
    ),
    "a backward of the user's own": (Sets.apply, "SetsBackward"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_an_operation_of_the_backward_is_named(name: str) -> None:
    operation, called = BACKWARD[name]
    _, (found,) = run(recipe(operation))
    assert (found.phase, found.microbatch) == ("backward", 1), found.text
    assert called in found.operation, found.text
    assert found.sample == 1 and found.tensor in ("blocks.0.weight", "blocks.0.bias"), found.text
    assert found.module == "blocks.1", found.text
    assert found.place == ("" if called == "SetsBackward" else line_of(operation)), found.text


def test_the_gradient_of_a_weight_has_no_samples() -> None:
    """Give the first layer an infinite feature, which `tanh` makes finite."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    what = recipe(
        model=build,
        loss=lambda module, batch: module(batch["x"]).square().sum(),
        train_data=samples(math.inf),
    )
    _, (found,) = run(what)
    assert (found.phase, found.tensor, found.microbatch) == ("backward", "0.weight", 1), found.text
    assert found.sample is None, found.text


class Drawn(nn.Module):
    """A logarithm that fails where dropout drops an element."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 1), nn.Dropout(0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        kept = self.drop(torch.ones(len(inputs), 4))
        return self.layer(inputs) + 0 * torch.log(kept - 0.5).sum(1, keepdim=True)


class Noisy(torch.utils.data.Dataset[Tensor]):
    """Samples that draw from the generators that the model draws from."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4) + random.random()


def test_what_depends_on_dropout_is_repeated() -> None:
    """The dropped elements of the search are those of the step."""
    dropped: list[list[int]] = []

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        values = module(batch).square()
        if module.training:
            dropped.append(values.isnan().flatten().nonzero().flatten().tolist())
        return values.sum()

    what = Recipe(Drawn, loss, Noisy())
    skipped, found = run(what, steps=20)
    assert skipped and found
    first = next(
        (number // 2 + 1, number % 2, rows[0]) for number, rows in enumerate(dropped) if rows
    )
    assert (found[0].step, found[0].microbatch, found[0].sample) == first
    assert found[0].operation == "torch.log"


@pytest.mark.parametrize("log_every", [1, 10])
@pytest.mark.parametrize("name", ["a division by zero", "the root of zero"])
def test_the_search_changes_no_bit(tmp_path: Path, name: str, log_every: int) -> None:
    operation, _ = {**FORWARD, **BACKWARD}[name]

    class Random(Model):
        def forward(self, inputs: Tensor, bad: Tensor) -> Tensor:
            noise = torch.randn_like(inputs) * random.random()
            return super().forward(F.dropout(inputs, 0.1) + noise, bad)

    saved = []
    for finds in (True, False):
        out = tmp_path / str(finds)
        keys = {"find_nonfinite": finds, "log_every": log_every, "steps": 8, "out": out}
        skipped, found = run(recipe(model=lambda: Random(operation)), **keys)
        assert [event.step for event in skipped] == [3, 8] and len(found) == finds
        saved.append(everything(out / "checkpoints" / "checkpoint-000008"))
    assert saved[0].keys() == saved[1].keys()
    assert [key for key in saved[0] if not torch.equal(saved[0][key], saved[1][key])] == []


def test_masks_and_a_loss_of_parts_do_not_mislead() -> None:
    class Masked(Model):
        def forward(self, inputs: Tensor, bad: Tensor) -> Tensor:
            mask = torch.full((8, 8), -math.inf).triu(1)
            hidden = self.first(inputs) + (mask.softmax(-1) @ torch.ones(8))
            return self.last(self.blocks[1](hidden, bad))

    def parts(module: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"task": squared(module, batch), "zero": 0 * module.get_parameter("last.bias").sum()}

    operation, _ = FORWARD["an exponential that overflows"]
    _, (found,) = run(recipe(model=lambda: Masked(operation), loss=LossParts(parts)))
    assert found.operation.endswith("exp") and found.module == "blocks.1", found.text


def test_the_turn_of_the_step_is_searched() -> None:
    def critic(models: Models, batch: dict[str, Tensor]) -> Tensor:
        return models["critic"](batch["x"], batch["bad"]).square().sum()

    def generator(models: Models, batch: dict[str, Tensor]) -> Tensor:
        return models["generator"](batch["x"], batch["bad"]).square().sum()

    operation, _ = BACKWARD["the root of zero"]
    models = {"critic": Model(operation), "generator": Model(keep)}
    what = recipe(
        model=lambda: Models(models),
        loss=Turns({"critic": critic, "generator": generator}),
    )
    skipped, (found,) = run(what)
    assert [event.step for event in skipped] == [3]
    assert found.module == "critic.blocks.1" and found.tensor.startswith("critic.blocks.0")


def test_steps_in_a_row_are_searched_once() -> None:
    what = recipe(model=with_value("last.bias", math.nan))
    with pytest.raises(NonFiniteTraining):
        run(what, steps=20, max_nonfinite=5)
    events: list[Any] = []
    with pytest.raises(NonFiniteTraining):
        fit(
            what,
            override(SETTINGS, {"max_nonfinite": 4, "steps": 20}),
            backend="cpu",
            observers=[events.append],
        )
    kinds = [type(event) for event in events if isinstance(event, StepSkipped | NonFiniteFound)]
    assert kinds == [StepSkipped, NonFiniteFound, *[StepSkipped] * 3]


def test_a_search_that_fails_does_not_end_the_run() -> None:
    calls = []

    def loss(module: nn.Module, batch: dict[str, Any]) -> Tensor:
        calls.append(1)
        if len(calls) == 9:  # eight microbatches of four steps come first
            raise ValueError("twice")
        return squared(module, batch)

    operation, _ = FORWARD["a division by zero"]
    _, (found,) = run(recipe(operation, loss=loss), evaluate__sanity_check=False)
    assert found.rank is None
    assert "the forward could not be run again: ValueError: twice" in found.text


def test_a_step_of_the_users_own_is_not_searched() -> None:
    def step(module: nn.Module, batch: dict[str, Any], microstep: Any) -> Tensor:
        loss = squared(module, batch)
        return microstep.backward(loss, 1 / microstep.num_items())

    operation, _ = FORWARD["a division by zero"]
    skipped, found = run(recipe(operation, step=step))
    assert len(skipped) == 1 and not found

"""Optimizers with a state of their own, and changes that observers make during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from drivetrain import CheckpointSettings, Recipe, ScheduleSettings, Settings
from drivetrain.checkpoint import CheckpointReader
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.events import Resumed, StepEnded
from drivetrain.trainer.fit import fit

Named = Iterable[tuple[str, nn.Parameter]]
ROWS = torch.utils.data.TensorDataset(
    torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), torch.ones(32, 2)
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


def squared(module: nn.Module, batch: Any) -> Tensor:
    return (module(batch[0]) - batch[1]).square().sum()


def run(
    steps: int,
    build: Callable[[Named], torch.optim.Optimizer] | None = None,
    model: Callable[[], nn.Module] = Model,
    **how: Any,
) -> dict[str, Tensor]:
    """Train; return the final weights."""
    settings = Settings(
        steps=steps,
        global_batch=4,
        schedule=ScheduleSettings("constant"),
        checkpoint=CheckpointSettings(every=2),
    )
    result = fit(
        Recipe(model, squared, ROWS, optimizer=build),
        settings,
        backend="cpu",
        finish=lambda module: {n: p.detach().clone() for n, p in module.state_dict().items()},
        **how,
    )
    assert not result.save_error
    return result.finish  # type: ignore[no-any-return]


def parameters(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


class Lookahead(torch.optim.SGD):
    """An optimizer that goes back half of the way in each third step. An attribute counts the
    steps.
    """

    turns = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turns": self.turns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.turns = state_dict["turns"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.turns += 1
        self.param_groups[0]["maximize"] = self.turns % 3 == 0
        super().step()


class KeepsMomentum(torch.optim.Optimizer):
    """An optimizer whose moments are a list in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.moments = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "moments": self.moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.moments = [moment.clone() for moment in state_dict["moments"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [(p, g["lr"]) for g in self.param_groups for p in g["params"]]
        for (parameter, lr), moment in zip(every, self.moments, strict=True):
            moment.mul_(0.9).add_(parameter.grad)  # type: ignore[arg-type]
            parameter.sub_(moment, alpha=lr)


@pytest.mark.parametrize("kind", [Lookahead, KeepsMomentum])
def test_what_a_state_dict_adds_is_resumed(kind: Any, tmp_path: Path) -> None:
    def build(named: Named) -> torch.optim.Optimizer:
        return kind(parameters(named), lr=0.05)  # type: ignore[no-any-return]

    whole = run(7, build)
    run(4, build, out=tmp_path)
    resumed = run(7, build, out=tmp_path, resume="auto")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


class KeepsWords(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": {"a": 1}}


class Both(torch.optim.Optimizer):
    """Two optimizers wrapped as one, each with its own state."""

    def __init__(self, named: Named) -> None:
        ends = parameters(named)
        self.first = torch.optim.SGD(ends[:2], lr=0.1, momentum=0.9)
        self.last = torch.optim.AdamW(ends[2:], lr=0.1)
        super().__init__([*self.first.param_groups, *self.last.param_groups], {})

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first.state_dict(), "last": self.last.state_dict()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first.step(), self.last.step()


class WithoutInit(torch.optim.Optimizer):
    def __init__(self, named: Named) -> None:
        self.inner = torch.optim.SGD(parameters(named), lr=0.1)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda named: KeepsWords(parameters(named), lr=0.1), "KeepsWords keeps slow, which no"),
        (Both, "Both keeps a state_dict.. without 'state', first, last, which no"),
        (WithoutInit, "WithoutInit, whose __init__ does not call"),
    ],
    ids=["words", "both", "without"],
)
def test_what_cannot_be_saved_is_refused_before_the_first_step(
    build: Any, message: str, tmp_path: Path
) -> None:
    steps: list[Any] = []

    def observe(event: object) -> None:
        steps.extend([event] * isinstance(event, StepEnded))

    with pytest.raises(RecipeError, match=message):
        run(4, build, out=tmp_path, observers=[observe])
    assert not steps
    if build is not WithoutInit:
        run(2, build)  # what is not saved need not be


class Holding:
    """Keeps the model and the optimizer of a run, for an observer."""

    def __init__(self, act: Callable[[Holding], None], step: int = 3) -> None:
        self.act, self.step = act, step
        self.notes: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        self.module = Model()
        return self.module

    def build(self, named: Named) -> torch.optim.Optimizer:
        first = [p for name, p in named if name.startswith("first")]
        self.optimizer = torch.optim.AdamW(first, lr=0.05)
        return self.optimizer

    def __call__(self, event: object) -> None:
        if isinstance(event, StepEnded) and event.step == self.step:
            self.act(self)
        if isinstance(event, Resumed):
            self.notes = event.notes


def add_group(run: Holding) -> None:
    run.optimizer.add_param_group({"params": list(run.module.last.parameters()), "lr": 0.02})  # type: ignore[union-attr,operator]


def test_a_group_that_is_added_is_trained_and_saved(tmp_path: Path) -> None:
    adding = Holding(add_group)
    weights = run(6, adding.build, adding.model, out=tmp_path, observers=[adding])
    before = run(3, Holding(add_group).build)
    assert not torch.equal(weights["last.weight"], before["last.weight"])
    (newest,) = tmp_path.glob("checkpoints/*6")
    reader = CheckpointReader(newest)
    assert "last.weight/exp_avg" in reader.names("optimizer")
    later = Holding(lambda run: None)
    run(8, later.build, later.model, out=tmp_path, resume="auto", observers=[later])
    reported = " ".join(later.notes)
    assert "frozen now: last.bias, last.weight" in reported
    assert "the optimizer had 2 groups, has 1" in reported

    def both(named: Named) -> torch.optim.Optimizer:
        first = Holding.build(later, list(named)[:2])
        add_group(later)
        return first

    again = Holding(lambda run: None)
    whole = Holding(add_group)
    expected = run(8, whole.build, whole.model, observers=[whole])
    later.module = again.model()

    def model() -> nn.Module:
        return later.module

    found = run(8, both, model, out=tmp_path / "b", resume=newest)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_moments_follow_the_names_that_pruning_gives(tmp_path: Path) -> None:
    pruning = Holding(lambda run: prune.l1_unstructured(run.module.first, "weight", 0.5))  # type: ignore[no-untyped-call,arg-type]

    def pruned() -> nn.Module:
        module = Model()
        prune.l1_unstructured(module.first, "weight", 0.5)  # type: ignore[no-untyped-call]
        return module

    def all_of(named: Named) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters(named), lr=0.05)

    whole = run(6, all_of, pruning.model, observers=[pruning])
    run(4, all_of, pruning.model, out=tmp_path, observers=[pruning])
    resumed = run(6, all_of, pruned, out=tmp_path, resume="auto")
    assert whole["first.weight_mask"].sum() == 8
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_parameter_that_was_replaced_is_named(tmp_path: Path) -> None:
    def replace(run: Holding) -> None:
        run.module.first.weight = nn.Parameter(torch.zeros(4, 4))  # type: ignore[union-attr]

    replacing = Holding(replace)
    with pytest.raises(RecipeError, match=r"other parameters in the places of first\.weight"):
        run(6, replacing.build, replacing.model, out=tmp_path, observers=[replacing])

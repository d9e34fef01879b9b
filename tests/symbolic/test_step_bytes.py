"""The memory of a step that is run without it: as much as a real step allocates."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from few_cases import only_quick
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from drivetrain import Models, OptimizerSettings, Recipe, Settings, Turns
from drivetrain.backends import cpu
from drivetrain.kernel.errors import SettingError
from drivetrain.kernel.events import StepEnded
from drivetrain.registry import find_driver
from drivetrain.symbolic.first_batch import first_batch
from drivetrain.symbolic.step import KINDS, NotSymbolic, symbolic_step
from drivetrain.trainer.fit import fit

WIDTH = 256
SETTINGS = Settings(steps=4, global_batch=16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def blocks(count: int = 2) -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, WIDTH), *(Block() for _ in range(count)))


def summed(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
    result: Tensor = module(batch[0]).float().square().flatten(1).mean(1).sum()
    return result


def tokens() -> TensorDataset:
    return TensorDataset(torch.randint(0, 1000, (64, 32), generator=torch.Generator()))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3)),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6400, 1024)),
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.MultiheadAttention(WIDTH, 4, batch_first=True, dropout=0.1)
        self.norm, self.wide = nn.BatchNorm1d(20), nn.Linear(WIDTH, 16384)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.wide(self.norm(x + self.mixed(x, x, x)[0]).mean(1))
        return result


RECIPES: dict[str, Callable[[], Recipe]] = {
    "blocks": lambda: Recipe(blocks, summed, tokens()),
    "attention": lambda: Recipe(Attention, summed, TensorDataset(torch.zeros(64, 20, WIDTH))),
    "convolutions": lambda: Recipe(convolutions, summed, TensorDataset(torch.zeros(64, 3, 24, 24))),
}


def found(
    recipe: Recipe,
    settings: Settings = SETTINGS,
    backend: Any = "cpu",
    num_ranks: int = 1,
    **options: Any,
) -> dict[str, int]:
    driver = find_driver(backend) if isinstance(backend, str) else backend
    plan = settings.plan(driver.options_type(**options))
    batch_of = partial(first_batch, recipe, settings)
    return dict(symbolic_step(recipe, driver, plan, settings, num_ranks, batch_of).bytes)


def allocated(recipe: Recipe, settings: Settings) -> int:
    """Return the most bytes that torch's allocator has given out at one time, from the second
    step to the last of a real run."""
    ends: list[int] = []

    def note(event: object) -> None:
        if isinstance(event, StepEnded):
            with torch.profiler.record_function("step ended"):
                ends.append(event.step)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        fit(recipe, settings, backend="cpu", observers=[note])
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda each: each.start_ns())
    total = peak = num_ended = 0
    for each in events:
        num_ended += each.name() == "step ended"
        total += each.nbytes() if each.name() == "[memory]" else 0
        if 2 <= num_ended < settings.steps:
            peak = max(peak, total)
    assert len(ends) == num_ended == settings.steps
    return peak


CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bf16": {"precision": "bf16"},
    "recomputed": {"activation_checkpointing": ("*",)},
    "accumulating": {"micro_batch": 3},
    "SGD": {"optimizer": OptimizerSettings(name="torch.optim.SGD", lr=0.01)},
}


@pytest.mark.parametrize(
    ("name", "change"), only_quick(product(RECIPES, CHANGES), lambda case: case[0] == "blocks")
)
def test_it_is_what_a_real_step_allocates(name: str, change: str) -> None:
    changed = CHANGES[change]
    settings = replace(SETTINGS, **changed)
    predicted = sum(found(RECIPES[name](), settings).values())
    # the scratch memory inside of an operator is not seen
    error = 0.01 if name == "blocks" else 0.04
    assert predicted == pytest.approx(allocated(RECIPES[name](), settings), rel=error)


# --- drivers of several ranks ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights() -> int:
    return sum(each.nbytes for each in blocks().parameters())


def test_ddp_keeps_the_whole_model_and_its_buckets(weights: int) -> None:
    kinds = found(RECIPES["blocks"](), backend="ddp", num_ranks=4)
    assert kinds["weights"] == kinds["gradients"] == weights
    assert kinds["optimizer"] == pytest.approx(2 * weights, rel=0.001)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(64, marks=pytest.mark.slow)])
def test_fsdp_keeps_a_part(weights: int, num_ranks: int) -> None:
    kinds = found(RECIPES["blocks"](), replace(SETTINGS, global_batch=64), "fsdp", num_ranks)
    assert kinds["weights"] == pytest.approx(weights / num_ranks, rel=0.05)
    assert kinds["optimizer"] == pytest.approx(2 * weights / num_ranks, rel=0.05)
    assert kinds["communication"] > weights / 8  # the root's weights, gathered


@pytest.mark.slow
def test_groups_of_fsdp_keep_more() -> None:
    settings = replace(SETTINGS, global_batch=64)
    whole = found(RECIPES["blocks"](), settings, "fsdp", 8)
    groups = found(RECIPES["blocks"](), settings, "fsdp", 8, shard_size=2)
    assert groups["weights"] == pytest.approx(4 * whole["weights"], rel=0.01)


@pytest.mark.slow
def test_gathered_weights_that_are_kept_are_counted() -> None:
    # where the step is fullest, those of two blocks are there anyway
    recipe = replace(RECIPES["blocks"](), model=partial(blocks, 6))
    freed = found(recipe, backend="fsdp", num_ranks=4)
    kept = found(recipe, backend="fsdp", num_ranks=4, reshard_after_forward=False)
    of_block = sum(each.nbytes for each in Block().parameters())
    assert sum(kept.values()) > sum(freed.values()) + of_block


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_zero_makes_its_updates(weights: int, stage: int) -> None:
    kinds = found(RECIPES["blocks"](), backend="deepspeed", num_ranks=2, stage=stage)
    assert kinds["optimizer"] >= weights  # two moments of a half
    assert kinds["weights"] == (weights if stage < 3 else pytest.approx(0, abs=weights / 10))


def test_layers_that_are_partitioned(weights: int) -> None:
    from drivetrain import Parallel

    split = {"*.up": "column", "*.down": "row"}
    recipe = replace(RECIPES["blocks"](), parallel=Parallel(tensor=split))
    kinds = found(recipe, backend="mesh", num_ranks=2, tensor=2)
    linear = 2 * sum(each.weight.nbytes for each in (Block().up, Block().down))
    assert kinds["weights"] == pytest.approx(weights - linear / 2, rel=0.01)


# --- what it does not do --------------------------------------------------------------------------


def test_it_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe = Recipe(
        lambda: nn.Linear(200_000, 200_000), summed, TensorDataset(torch.zeros(16, 200_000))
    )
    kinds = found(recipe)
    assert kinds["weights"] == 4 * (200_000**2 + 200_000)  # 160 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB


def test_two_predictions_are_the_same() -> None:
    first, second = (found(RECIPES["blocks"](), backend="fsdp", num_ranks=4) for _ in range(2))
    assert first == second


def test_nothing_is_left() -> None:
    torch.manual_seed(7)
    drawn, environment = torch.rand(1), dict(os.environ)
    torch.manual_seed(7)
    found(RECIPES["blocks"](), backend="ddp", num_ranks=4)
    assert torch.equal(torch.rand(1), drawn)
    assert not dist.is_initialized()
    assert dict(os.environ) == environment
    assert fit(RECIPES["blocks"](), SETTINGS, backend="ddp").step == SETTINGS.steps


FORKS = """
import torch
from torch import nn
from drivetrain import Recipe, Settings, fit
from drivetrain.registry import find_driver
from drivetrain.symbolic.step import symbolic_step

rows = torch.zeros(64, 8)
recipe = Recipe(lambda: nn.Linear(8, 8), lambda module, batch: module(batch).sum(), rows)
settings, driver = Settings(steps=2, global_batch=16), find_driver("cpu")
plan = settings.plan(driver.options_type())
symbolic_step(recipe, driver, plan, settings, 1, lambda num_readers: rows[:16])
print("steps", fit(recipe, settings, backend="ddp", nproc=2, progress=False).step)
"""


@pytest.mark.slow
def test_ranks_can_be_forked_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=False
    )
    assert "steps 2" in done.stdout, done.stderr[-3000:]


class _Keeps(cpu.CpuDriver):
    """Keeps a copy of each weight, as if by mistake."""

    def open(self, plan: Any) -> Any:
        opened = super().open(plan)

        class Kept:
            def __enter__(self) -> Any:
                session = opened.__enter__()
                prepare = session.prepare

                def keeping(recipe: Recipe) -> Any:
                    engine: Any = prepare(recipe)
                    engine.copies = [each.detach().clone() for each in engine.module.parameters()]
                    return engine

                session.prepare = keeping
                return session

            def __exit__(self, *error: Any) -> Any:
                return opened.__exit__(*error)

        return Kept()


def test_it_is_the_driver_s_own_step(weights: int) -> None:
    usual, more = found(RECIPES["blocks"]()), found(RECIPES["blocks"](), backend=_Keeps())
    assert sum(more.values()) == sum(usual.values()) + weights
    assert set(usual) | set(more) <= set(KINDS)


# --- refusals -------------------------------------------------------------------------------------


def _reads(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
    batch[0].numpy()
    return summed(module, batch)


def _selects(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
    result: Tensor = module(batch[0]).flatten()
    return result[result > 0].sum()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss": _reads}, "numpy"),
        ({"loss": _selects}, "DynamicOutputShape"),
        (
            {
                "model": lambda: nn.LSTM(WIDTH, 8),
                "loss": lambda module, batch: module(batch[0])[0].sum(),
                "train_data": TensorDataset(torch.zeros(64, 20, WIDTH)),
            },
            "workspace",
        ),
    ],
    ids=["reads numbers", "a shape by numbers", "an unknown workspace"],
)
def test_a_step_that_needs_numbers_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(NotSymbolic, match=re.escape(why)):
        found(replace(RECIPES["blocks"](), **change))
    assert not dist.is_initialized()


def test_a_pipeline_is_refused() -> None:
    with pytest.raises(NotSymbolic, match=r"a stage learns from|torch 2\.8"):
        found(RECIPES["blocks"](), backend="mesh", num_ranks=2, pipeline=2)


def test_options_that_do_not_fit_are_refused_as_in_a_run() -> None:
    with pytest.raises(SettingError, match=r"shard_size is 3"):
        found(RECIPES["blocks"](), backend="fsdp", num_ranks=4, shard_size=3)


def test_updates_that_take_turns_are_all_looked_at() -> None:
    def of(name: str) -> Callable[[Any, tuple[Tensor]], Tensor]:
        return lambda models, batch: summed(models[name], batch)

    def build() -> Models:
        return Models({"small": nn.Linear(8, 8), "large": nn.Linear(8, 4096)})

    data = TensorDataset(torch.zeros(64, 8))
    turns = Turns({"large": of("large"), "small": of("small")})
    alone = found(Recipe(lambda: nn.Linear(8, 4096), summed, data))
    assert sum(found(Recipe(build, turns, data)).values()) > sum(alone.values())

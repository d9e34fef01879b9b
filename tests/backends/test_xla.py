"""The xla driver keeps the laws, on one device and on two, and has tests of its own
peculiarities.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from quick_cases import is_quick

from drivetrain.conformance import Case, cases
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.jobs import optimizer_called
from drivetrain.conformance.problems import PROBLEMS, Samples, collate
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import DataError, SettingError
from drivetrain.kernel.events import StepEnded

PYTHON = python_of_all()
ONE = Subject("xla", options={"devices": 1}, python=PYTHON)
TWO = Subject("xla", options={"devices": 2}, python=PYTHON)

pytestmark = pytest.mark.usefixtures("environment_of_all")


@pytest.mark.parametrize(
    "case",
    only_quick(cases("xla", options={"devices": 1}, peers=["cpu"], python=PYTHON), is_quick),
    ids=str,
)
def test_laws(case: Case) -> None:
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", cases("xla", options={"devices": 2}, peers=["cpu"], python=PYTHON), ids=str
)
def test_laws_on_two_devices(case: Case) -> None:
    case.check()


FRESH = """
import torch
from torch import nn
from drivetrain import Recipe, Settings, fit

rows = torch.ones(8, 4)
recipe = Recipe(lambda: nn.Linear(4, 1), lambda module, batch: module(batch).sum(), rows)
print("steps", fit(recipe, Settings(steps=1), backend="xla", progress=False).step)
"""


def test_a_process_that_has_not_imported_it_trains() -> None:
    """autograd must not run before XLA's devices are known."""
    run = subprocess.run([PYTHON, "-c", FRESH], capture_output=True, text=True, check=False)
    assert "steps 1" in run.stdout, run.stderr[-3000:]


# --- jobs, run in the worker ------------------------------------------------------------------


def train_and_count(bench: Bench, *, numbers: list[int]) -> dict[str, Any]:
    """A job: do updates of the given numbers of microbatches; return the compilations so far after
    each.
    """
    from torch_xla.debug import metrics

    problem, samples = PROBLEMS["language"], Samples("language", 10**6)
    counts = []
    with bench.open(max_grad_norm=1.0) as session:
        engine = session.prepare(problem.recipe(optimizer=optimizer_called("AdamW")))
        total = sum(numbers)
        batches = session.feed(
            iter([collate([samples[4 * k + j] for j in range(4)]) for k in range(total)])
        )
        for step, number in enumerate(numbers):
            for remaining in reversed(range(number)):
                batch = next(batches)
                with engine.microbatch(not remaining):
                    loss = problem.loss(engine.module, batch)
                    weight = loss.detach().new_full((), 0.01 + 0.001 * step)
                    engine.backward(loss, weight)
            for group in engine.param_groups:
                group["lr"] = 0.1 / (step + 1)
            engine.update().applied()
            counts.append(metrics.metric_data("CompileTime")[0])
        optimizer = engine.optimizer  # type: ignore[attr-defined]
        sharded = {
            name: [
                engine.placement.is_sharded(tensor)  # type: ignore[attr-defined]
                for tensor in (parameter, *optimizer.state[parameter].values())
                if tensor.dim()
            ]
            for name, parameter in engine.module.named_parameters()
        }
        tied = engine.module.head.weight is engine.module.embedding.weight
        return {"counts": counts, "sharded": sharded, "tied": tied}


def fit_and_count(bench: Bench, *, epochs: float) -> list[int]:
    """A job: return the compilations so far after each step of `fit`, on 41 samples in groups of
    12, 12, 12 and 5.
    """
    counts = []

    def observe(event: object) -> None:
        if isinstance(event, StepEnded):
            from torch_xla.debug import metrics

            counts.append(metrics.metric_data("CompileTime")[0])

    problem = PROBLEMS["language"]
    recipe = problem.recipe(
        train_data=Samples("language", 41), eval_data={"five": Samples("language", 5)}
    )
    settings = {"epochs": epochs, "global_batch": 12, "micro_batch": 8, "evaluate.every": 3}
    bench.fit(recipe, settings, observers=[observe])
    return counts


def restart(bench: Bench, *, devices: int) -> str:
    """A job: return the refusal of another number of devices in a process that already runs XLA."""
    with bench.open():
        pass
    try:
        with Bench(bench.backend, {"devices": devices}).open():
            return ""
    except SettingError as refusal:
        return str(refusal)


def feed_shapes(bench: Bench, *, sizes: list[int]) -> str:
    with bench.open() as session:
        try:
            for _ in session.feed(iter([torch.zeros(size) for size in sizes])):
                pass
        except DataError as refusal:
            return str(refusal)
    return ""


# --- what is special --------------------------------------------------------------------------


@pytest.mark.parametrize("subject", [ONE, TWO], ids=["one", "two"])
@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up(subject: Subject) -> None:
    (seen,) = subject.run(train_and_count, numbers=[1, 2, 3, 1, 2, 3, 4, 1])
    warm = seen["counts"][2]
    assert seen["counts"][3:] == [warm] * 5
    assert seen["tied"]


@pytest.mark.slow
@pytest.mark.parametrize("subject", [ONE, TWO], ids=["one", "two"])
def test_a_short_group_at_the_end_of_an_epoch_compiles_nothing(subject: Subject) -> None:
    (counts,) = subject.run(fit_and_count, epochs=2.0)
    assert len(counts) == 8
    assert counts[1] == counts[2], "the third group is as the second"
    assert counts[3:] == [counts[3]] * 5, "only evaluation after the third compiled"


def test_weights_and_optimizer_state_are_sharded_over_the_devices() -> None:
    (seen,) = TWO.run(train_and_count, numbers=[1, 1])
    assert all(all(parts) for parts in seen["sharded"].values())
    (seen,) = ONE.run(train_and_count, numbers=[1, 1])
    assert not any(any(parts) for parts in seen["sharded"].values())


def test_the_number_of_devices_is_fixed_in_a_process() -> None:
    (message,) = TWO.run(restart, devices=3)
    assert "backend.devices is 3, and XLA runs with 2" in message


def test_too_many_shapes_of_batches_are_refused() -> None:
    subject = Subject("xla", options={"devices": 1, "max_batch_shapes": 3}, python=PYTHON)
    assert subject.run(feed_shapes, sizes=[1, 2, 3, 2, 1]) == [""]
    (message,) = subject.run(feed_shapes, sizes=[1, 2, 3, 4])
    assert "more than 3 shapes of batches" in message
    assert "max_batch_shapes" in message

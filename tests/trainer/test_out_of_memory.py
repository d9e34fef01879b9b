"""When memory runs out, the run continues with smaller microbatches, or suggests what
would help.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Batches, CheckpointSettings, EvaluateSettings, Recipe, Settings
from drivetrain.kernel.errors import OutOfMemory, OutputError
from drivetrain.kernel.events import Evaluated, Event, Logged, Warned
from drivetrain.trainer.fit import fit

from .problems import Pairs, build, recipe, squared_error

SETTINGS = Settings(steps=6, global_batch=8, log_every=1, evaluate=EvaluateSettings(every=3))


def short_of_memory(rows: int, when: Callable[[bool], bool] = bool) -> Recipe:
    """Return a recipe whose forward fails on more than `rows` rows; `when(training)` selects the
    forwards.
    """

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        result = squared_error(module, batch)
        if len(batch[0]) > rows and when(module.training):
            raise torch.OutOfMemoryError(f"room for {rows} rows")
        return result

    return dataclasses.replace(recipe(), loss=loss)


def run(what: Recipe, settings: Settings = SETTINGS, **kwargs: Any) -> list[Event]:
    events: list[Event] = []
    fit(what, settings, backend="cpu", observers=[events.append], **kwargs)
    return events


def figures(events: list[Event]) -> list[tuple[Any, ...]]:
    return [
        (type(e).__name__, e.step, e.loss if isinstance(e, Logged) else e.metrics["loss"])
        for e in events
        if isinstance(e, (Logged, Evaluated))
    ]


def words(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Warned)]


def assert_same_figures(events: list[Event], expected: list[Event]) -> None:
    assert [each[:2] for each in figures(events)] == [each[:2] for each in figures(expected)]
    values = [value for *_, value in figures(events)]
    assert values == pytest.approx([value for *_, value in figures(expected)], rel=1e-6)


@pytest.mark.parametrize("first_fails_at", [1, 5])
def test_the_figures_are_those_of_a_run_with_enough_memory(first_fails_at: int) -> None:
    forwards = 0

    def when(training: bool) -> bool:
        nonlocal forwards
        forwards += training
        return training and forwards >= first_fails_at

    events = run(short_of_memory(2, when))
    assert_same_figures(events, run(recipe()))
    assert len(words(events)) == 2
    assert "out of memory in step" in words(events)[0]
    assert "micro_batch=8" in words(events)[0]
    assert "continuing with micro_batch=4" in words(events)[0]
    assert "continuing with micro_batch=2" in words(events)[1]


def test_an_evaluation_is_halved_by_itself() -> None:
    events = run(short_of_memory(4, lambda training: not training))
    assert_same_figures(events, run(recipe()))
    (reported,) = words(events)
    assert "the evaluation 'held_out' with evaluate.micro_batch=8" in reported


def test_later_starts_know(tmp_path: Path) -> None:
    run(short_of_memory(2), out=tmp_path)
    longer = dataclasses.replace(SETTINGS, steps=9)
    events = run(short_of_memory(2), longer, out=tmp_path, resume="auto")
    assert not words(events)
    (tmp_path / "memory.json").unlink()
    even_longer = dataclasses.replace(SETTINGS, steps=12)
    assert words(run(short_of_memory(2), even_longer, out=tmp_path, resume="auto"))


def test_what_is_remembered_is_checked(tmp_path: Path) -> None:
    for forged in ('{"global_batch": 1}', '{"micro_batch": 0}', "[", '{"micro_batch": "1"}'):
        (tmp_path / "memory.json").write_text(forged)
        with pytest.raises(OutputError, match=r"memory\.json .*delete it"):
            run(recipe(), out=tmp_path)


def test_the_state_is_saved_where_the_run_saves_nothing(tmp_path: Path) -> None:
    off = CheckpointSettings(at_end=False)
    events = run(short_of_memory(2), dataclasses.replace(SETTINGS, checkpoint=off), out=tmp_path)
    assert_same_figures(events, run(recipe()))


def test_a_stop_may_be_asked_for() -> None:
    stop = dataclasses.replace(SETTINGS, out_of_memory="stop")
    with pytest.raises(OutOfMemory, match=r"set micro_batch=4.*activation_checkpointing"):
        run(short_of_memory(4), stop)


def test_one_sample_that_does_not_fit_ends_the_run() -> None:
    with pytest.raises(OutOfMemory, match=r"micro_batch=1 \(room for 0 rows\): recompute"):
        run(short_of_memory(0))


def test_batches_of_others_are_left_as_they_are() -> None:
    ready = Batches(DataLoader(Pairs(), batch_size=8))
    with pytest.raises(OutOfMemory, match="let your loader make smaller batches"):
        run(dataclasses.replace(short_of_memory(4), train_data=ready))


def test_an_update_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("no room for moments")

    what = dataclasses.replace(
        recipe(), optimizer=lambda named: Greedy([p for _, p in named], lr=0.1)
    )
    with pytest.raises(OutOfMemory, match=r"in the update.*moments.*; recompute"):
        run(what, out=tmp_path)


def test_a_model_that_does_not_fit_says_so() -> None:
    def too_large() -> nn.Module:
        raise MemoryError("nothing left")

    with pytest.raises(OutOfMemory, match="no memory for the model: nothing left; recompute"):
        run(dataclasses.replace(recipe(), model=too_large))


def test_other_errors_come_through() -> None:
    def loss(module: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        run(Recipe(model=build, loss=loss, train_data=Pairs()))


LIMITED = """
    import json, resource, sys
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from drivetrain import Recipe, Settings
    from drivetrain.trainer.fit import fit
    from drivetrain.kernel.events import Logged, Warned

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

        def forward(self, inputs):  # 32 MB a sample are kept for the backward
            wide = self.inner(inputs)[:, None].expand(-1, 1 << 19, -1)
            return self.last(torch.tanh(wide).mean(1))

    def loss(module, batch):
        return (module(batch[0]) - batch[1]).square().sum()

    reported = {"losses": [], "warned": []}

    def observe(event):
        if isinstance(event, Logged):
            reported["losses"].append(event.loss)
        if isinstance(event, Warned):
            reported["warned"].append(event.message)

    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    settings = Settings(steps=2, global_batch=16, log_every=1, micro_batch=json.loads(sys.argv[1]))
    recipe = Recipe(model=Wide, loss=loss, train_data=data)
    fit(recipe, Settings(steps=1, global_batch=1), backend="cpu")  # what torch loads late
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + (450 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    fit(recipe, settings, backend="cpu", observers=[observe])
    print(json.dumps(reported))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on address space")
@pytest.mark.slow
def test_a_process_with_little_memory() -> None:
    """Let a real allocation fail: sixteen samples need more memory than the process is allowed."""
    assert resource.RLIM_INFINITY in resource.getrlimit(resource.RLIMIT_AS)

    def reported(micro_batch: int | None) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(LIMITED), json.dumps(micro_batch)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return value

    limited, small = reported(None), reported(1)
    assert not small["warned"]
    assert "continuing with micro_batch=8" in limited["warned"][0]
    assert limited["losses"] == pytest.approx(small["losses"], rel=1e-6)

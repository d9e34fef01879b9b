"""State of modules besides parameters and persistent buffers, in a run: `get_extra_state`, hooks of
`state_dict`, and buffers that are not persistent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Settings, fit
from drivetrain.checkpoint import CheckpointReader
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.events import Resumed, Warned
from drivetrain.trainer.settings import CheckpointSettings, ScheduleSettings
from trainer.problems import everything, recipe

SETTINGS = Settings(
    steps=4,
    global_batch=4,
    schedule=ScheduleSettings(name="constant"),
    checkpoint=CheckpointSettings(every=2),
)


class Scaled(nn.Linear):
    """A layer with delayed scaling: it divides by the largest value of the last batch."""

    def __init__(self, state: Callable[[Tensor], Any] = lambda largest: {"largest": largest}):
        super().__init__(4, 1)
        self.largest, self.state = torch.ones(()), state

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x / self.largest)
        if self.training:
            self.largest = 0.1 + x.detach().abs().max()
        return y

    def get_extra_state(self) -> Any:
        return self.state(self.largest)

    def set_extra_state(self, state: Any) -> None:
        self.largest = state["largest"]


class Stateless(nn.Linear):
    """A layer of the same weights."""

    def __init__(self) -> None:
        super().__init__(4, 1)


class Written(nn.Module):
    """Writes a buffer that is not persistent, in place or by another tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(4, 1), in_place
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.in_place:
            self.count += 1
        elif self.training:
            self.count = self.count + 1
        y: Tensor = self.layer(x + self.table)
        return y


def trained(
    model: Callable[[], nn.Module], out: Path | None = None, **arguments: Any
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Train; return the state at the end, the warnings, and the notes of the resume."""
    warned, notes, found = [], [], {}

    def see(event: object) -> None:
        if isinstance(event, Warned):
            warned.append(event.message)
        if isinstance(event, Resumed):
            notes.extend(event.notes)

    def finish(module: Any) -> None:
        layer = module[0] if isinstance(module, nn.Sequential) else module
        found.update(weight=layer.weight.clone(), largest=getattr(layer, "largest", None))

    settings = dataclasses.replace(SETTINGS, steps=arguments.pop("steps", 4))
    chosen = dataclasses.replace(recipe(num_eval=0), model=model)
    fit(chosen, settings, backend="cpu", out=out, observers=[see], finish=finish, **arguments)
    return found, warned, notes


def in_a_sequence(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(layer())


def test_extra_state_is_resumed(tmp_path: Path) -> None:
    model = in_a_sequence(Scaled)
    whole, warned, _ = trained(model, tmp_path / "whole")
    trained(model, tmp_path / "stopped", steps=2)
    resumed, _, notes = trained(model, tmp_path / "stopped", resume="auto")
    assert not warned
    assert notes == ["steps was 2, is 4"]
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
    last = "checkpoints/checkpoint-000004"
    states = [everything(tmp_path / run / last) for run in ("whole", "stopped")]
    assert states[0].keys() == states[1].keys()
    assert "state/extra/0._extra_state/json" in states[0]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_state_that_no_checkpoint_can_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    model = in_a_sequence(lambda: Scaled(lambda largest: {"a": object()}))
    with pytest.raises(RecipeError, match=r"0\._extra_state\['a'\] is a object"):
        trained(model, tmp_path / "run")
    assert not list(tmp_path.glob("run/checkpoints/*"))
    trained(model)  # saves nothing


def test_state_that_becomes_such_is_refused_at_the_save(tmp_path: Path) -> None:
    model = in_a_sequence(lambda: Scaled(lambda largest: None if largest == 1 else object()))
    with pytest.raises(RecipeError, match=r"0\._extra_state is a object"):
        trained(model, tmp_path / "run")


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        (Scaled, Stateless, "only the checkpoint has: 0._extra_state; it is left out"),
        (Stateless, Scaled, "only the model has: 0._extra_state; it stays as it is"),
    ],
)
def test_state_of_one_side_alone_is_named(
    first: Any, second: Any, note: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(in_a_sequence(first), tmp_path / "run", steps=2)
    _, _, notes = trained(in_a_sequence(second), tmp_path / "run", resume="auto")
    (named,) = (each for each in notes if "extra state" in each)
    assert named.startswith(f"extra state that {note}")


@pytest.mark.parametrize("in_place", [True, False])
def test_a_written_buffer_that_is_not_persistent_is_named_once(
    in_place: bool, tmp_path: Path
) -> None:
    class Model(Written):
        @property
        def weight(self) -> Tensor:
            return self.layer.weight

    _, warned, _ = trained(lambda: Model(in_place), tmp_path / "run")
    assert [each.partition(",")[0] for each in warned] == ["a forward has written to count"]
    assert not trained(lambda: Model(in_place))[1]  # nothing is resumed


def test_a_checkpoint_names_its_extra_state(tmp_path: Path) -> None:
    trained(in_a_sequence(Scaled), tmp_path / "run", steps=2)
    reader = CheckpointReader(tmp_path / "run/checkpoints/checkpoint-000002")
    names = [name for name in reader.names("state") if not name.startswith("rng/")]
    assert names == ["extra/0._extra_state/0", "extra/0._extra_state/json"]
    text = bytes(reader.read("state", names[1]).tolist())
    assert text.split() == b'{ "dict": [ [ "largest", { "tensor": 0 } ] ] }'.split()

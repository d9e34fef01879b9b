"""`checkpoint.link_frozen`: frozen weights are written twice, and linked to afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainer.problems import Pairs, everything, squared_error

from drivetrain import CheckpointSettings, Recipe, Settings, lora
from drivetrain.checkpoint import CheckpointReader, export_weights, list_checkpoints
from drivetrain.cli.report.checkpoints import inspect
from drivetrain.kernel.events import Resumed
from drivetrain.ranks.fit import fit

SETTINGS = Settings(
    steps=4,
    global_batch=8,
    checkpoint=CheckpointSettings(every=1, keep_last=9, link_frozen=True),
)
WIDTH = 128
FROZEN = 4 * (4 * WIDTH + WIDTH * WIDTH + 2 * WIDTH)
"""Bytes of the frozen weights."""


def adapted() -> nn.Module:
    torch.manual_seed(7)
    layers = nn.Sequential(
        nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )
    model = lora(layers, "^2$", rank=2)
    model[3].requires_grad_()  # type: ignore[index, operator]
    return model


RECIPE = Recipe(adapted, squared_error, train_data=Pairs(40))
ONE = ("cpu", 1, {"threads": 1})


def run(out: Path, on: tuple[str, int, dict[str, Any]] = ONE, **changes: Any) -> list[Path]:
    """Train; return the run's checkpoint folders."""
    backend, nproc, options = on
    keep = {key: changes.pop(key) for key in ("background", "link_frozen") if key in changes}
    settings = dataclasses.replace(
        SETTINGS,
        steps=changes.pop("steps", SETTINGS.steps),
        checkpoint=dataclasses.replace(SETTINGS.checkpoint, **keep),
    )
    given = {"nproc": nproc} if nproc > 1 else {}
    fit(RECIPE, settings, backend=backend, backend_options=options, out=out, **given, **changes)
    return [found.folder for found in list_checkpoints(out / "checkpoints").complete]


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.glob("frozen-*")}


def assert_same(one: Path, other: Path) -> None:
    expected, found = everything(one), everything(other)
    assert expected.keys() == found.keys()
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.parametrize("background", [False, True], ids=["", "background"])
@pytest.mark.parametrize(
    "on",
    [
        ONE,
        pytest.param(("ddp", 2, {}), marks=pytest.mark.slow),
        pytest.param(("fsdp", 2, {}), marks=pytest.mark.slow),
        pytest.param(("deepspeed", 2, {"stage": 3}), marks=pytest.mark.slow),
        pytest.param(("mesh", 2, {"shard": 2}), marks=pytest.mark.slow),
    ],
    ids=lambda on: on[0],
)
def test_checkpoints_are_as_without_it_and_share_files(
    tmp_path: Path, on: tuple[str, int, dict[str, Any]], background: bool
) -> None:
    plain = run(tmp_path / "plain", on, link_frozen=False)
    linked = run(tmp_path / "linked", on, background=background)
    resumed = run(tmp_path / "linked", on, background=background, steps=6, resume="auto")
    assert [folder.name for folder in resumed[:4]] == [folder.name for folder in linked]
    of_step = [inodes(folder) for folder in resumed]
    assert of_step[0] and not of_step[0] & of_step[1]
    assert of_step == [*of_step[:2]] * 3
    for one, other in zip(plain, linked, strict=True):
        assert not list(one.glob("frozen-*"))
        assert_same(one, other)
        assert CheckpointReader(other).verify() == []
        apart = sum(path.stat().st_size for path in other.glob("frozen-*"))
        rest = sum(path.stat().st_size for path in other.glob("weights-*"))
        assert FROZEN <= apart < FROZEN + 2000 and rest < FROZEN / 10
    # another driver, alone, resumes from a file that was linked to as from one that was not
    whole = run(tmp_path / "a", resume=plain[2])
    again = run(tmp_path / "b", resume=linked[2])
    assert_same(whole[-1], again[-1])


def test_a_run_goes_back_to_the_other_file_where_one_is_damaged(tmp_path: Path) -> None:
    whole, folders = run(tmp_path / "whole"), run(tmp_path / "run")
    (bad,) = folders[3].glob("frozen-*")
    with bad.open("r+b") as file:  # in place: the second checkpoint has it, too
        file.seek(-4, 2)
        file.write(b"\0\0\1\0")
    events: list[Any] = []
    resumed = run(tmp_path / "run", resume="auto", observers=[events.append])
    (event,) = [event for event in events if isinstance(event, Resumed)]
    assert event.step == 3
    assert "checkpoint-000004 is left out, and kept: " in event.notes[0]
    assert bad.name in event.notes[0]
    assert_same(whole[3], resumed[3])
    sound = [CheckpointReader(folder).verify() == [] for folder in resumed]
    assert sound == [True, False, True, True]


def test_how_much_of_one_is_shared_can_be_seen(tmp_path: Path) -> None:
    folders = run(tmp_path, steps=3)
    for folder, shares in zip(folders, (True, False, True), strict=True):
        record = inspect(folder)
        (path,) = folder.glob("frozen-*")
        assert record["shared_bytes"] == (path.stat().st_size if shares else 0)
        assert record["num_bytes"] > FROZEN


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert not CheckpointSettings().link_frozen
    (folder,) = run(tmp_path, link_frozen=False, steps=1)
    assert not list(folder.glob("frozen-*"))


def test_what_the_optimizer_has_and_does_not_train_is_frozen(tmp_path: Path) -> None:
    """Use a recipe's own optimizer, which is given all parameters."""
    every = dataclasses.replace(
        RECIPE, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)
    )
    fit(every, SETTINGS, backend="cpu", out=tmp_path)
    folders = [found.folder for found in list_checkpoints(tmp_path / "checkpoints").complete]
    assert inodes(folders[0]) == inodes(folders[2]) != set()


def test_an_export_of_one_that_shares_is_whole(tmp_path: Path) -> None:
    folders = run(tmp_path / "run")
    exported = CheckpointReader(folders[-1]).read("weights", "0.weight")
    weights = load_file(export_weights(folders[-1], tmp_path / "whole") / "model.safetensors")
    assert torch.equal(weights["0.weight"], exported)
    assert {name for name in weights if "lora" in name} == set()

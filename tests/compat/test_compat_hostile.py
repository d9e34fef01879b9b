"""Hostile checkpoint folders: no code in them runs, and the message names the file."""

from __future__ import annotations

import io
import json
import os
import pickle  # house: pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import both

from drivetrain.compat.arguments import TrainingArguments
from drivetrain.kernel.errors import DrivetrainError

HF = {"checkpoint_format": "hf", "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
NAME = "checkpoint-2"


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.makedirs, (self.path,)


def saved(value: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


def pickles(canary: Path) -> dict[str, bytes]:
    bird = Canary(canary)
    found = {f"protocol {p}": pickle.dumps(bird, p) for p in range(pickle.HIGHEST_PROTOCOL + 1)}
    for name, zipped in (("zip", True), ("legacy", False)):
        found[name] = saved(
            {"state": bird, "w": torch.ones(1)}, _use_new_zipfile_serialization=zipped
        )
    found["eval"] = b"cbuiltins\neval\n(S'__import__(\"os\").makedirs(%r)'\ntR." % str(canary)
    found["system"] = b"cos\nsystem\n(S'mkdir %s'\ntR." % str(canary).encode()
    return found


PICKLED = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth",
           "pytorch_model.bin", "model.safetensors", "adapter_model.bin")  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a sound folder in HF's layout."""
    ours = both(tmp_path_factory.mktemp("base"))[0]
    ours.trainer(**HF).train()
    return ours.folder / NAME


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "given" / NAME))


def resume(folder: Path) -> str:
    """Resume from the folder; return the error, or an empty string."""
    trainer = both(folder.parent / "out")[0].trainer(save_strategy="no", max_steps=3)
    try:
        trainer.train(resume_from_checkpoint=str(folder))
    except (DrivetrainError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def put(folder: Path, name: str, raw: bytes) -> None:
    """Write a file under that name, and remove the files that would be read instead."""
    if name == "optimizer.bin":
        (folder / "optimizer.pt").unlink()
    if name in ("pytorch_model.bin", "adapter_model.bin"):
        (folder / "model.safetensors").unlink()
    if name == "adapter_model.bin":
        (folder / "adapter_config.json").write_text("{}")
    (folder / name).write_bytes(raw)


def test_a_sound_folder_is_resumed_from(folder: Path) -> None:
    assert resume(folder) == ""


@pytest.mark.parametrize("kind", list(pickles(Path("x"))))
@pytest.mark.parametrize("name", PICKLED)
def test_no_pickle_is_run(folder: Path, name: str, kind: str) -> None:
    canary = folder.parent / "canary"
    put(folder, name, pickles(canary)[kind])
    said = resume(folder)
    assert not canary.exists()
    assert NAME in said
    assert name in said or name == "adapter_model.bin"  # which a model without PEFT has no use for


@pytest.mark.parametrize("kind", list(pickles(Path("x"))))
def test_arguments_are_never_unpickled(folder: Path, kind: str) -> None:
    canary = folder.parent / "canary"
    put(folder, "training_args.bin", pickles(canary)[kind])
    assert resume(folder) == ""
    assert not canary.exists()


def test_torch_cannot_be_made_to_unpickle_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    canary = folder.parent / "canary"
    put(folder, "optimizer.pt", pickles(canary)["zip"])
    assert "optimizer.pt" in resume(folder)
    assert not canary.exists()


OTHERS: dict[str, Any] = {
    "None": None,
    "a number": 7,
    "a list": [1, 2],
    "an empty object": {"a": {}},
    "other keys": {"state": 1, "param_groups": 2},
    "groups of numbers": {"state": {}, "param_groups": [1]},
    "a tensor": torch.ones(3),
    "a tensor of terabytes": torch.ones(1).expand(1 << 40),
    "nested": {"state": {0: 7}, "param_groups": [{"params": [0]}]},
    "names that are numbers": {1: 2},
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scaler.pt", "rng_state.pth", "pytorch_model.bin"]
)
def test_what_holds_something_else_is_named(folder: Path, name: str, what: str) -> None:
    put(folder, name, saved(OTHERS[what]))
    assert name in resume(folder)


@pytest.mark.parametrize(
    "what", ["None", "a number", "a list", "a tensor", "names that are numbers"]
)
def test_a_schedule_of_something_else_is_named(folder: Path, what: str) -> None:
    put(folder, "scheduler.pt", saved(OTHERS[what]))
    assert "scheduler.pt" in resume(folder)


def in_optimizer(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: altered(folder / "optimizer.pt", change)


def in_schedule(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: altered(folder / "scheduler.pt", lambda state: state.update(changes))


def altered(path: Path, change: Callable[[Any], object]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def in_group(**changes: Any) -> Callable[[Path], None]:
    return in_optimizer(lambda state: state["param_groups"][0].update(changes))


def without(parameters: int) -> Callable[[Any], object]:
    """Return a function that gives the groups another value in the place of each parameter."""

    def change(state: Any) -> None:
        for group in state["param_groups"]:
            group["params"] = [parameters] * len(group["params"])

    return change


FITTING_NOTHING: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rate that is a word": (in_group(lr="x"), "'lr' of the optimizer's group 0 is 'x'"),
    "betas that are none": (in_group(betas=None), "'betas' of the optimizer's group 0 is None"),
    "one beta": (in_group(betas=(0.9,)), "'betas' of the optimizer's group 0"),
    "state of nobody": (in_optimizer(lambda state: state["state"].update({99: {}})), "99"),
    "groups of one parameter": (in_optimizer(without(0)), "its groups hold the parameters"),
    "an epoch that is a word": (in_schedule(last_epoch="x"), "'last_epoch' of the schedule"),
    "rates that are one": (in_schedule(base_lrs=3), "'base_lrs' of the schedule is 3"),
    "a count that is none": (in_schedule(_step_count=None), "'_step_count' of the schedule"),
}


@pytest.mark.parametrize("what", FITTING_NOTHING)
def test_what_does_not_fit_is_named_before_anything_is_changed(folder: Path, what: str) -> None:
    """Change one entry in the sound files of an optimizer and a schedule."""
    alter, reported = FITTING_NOTHING[what]
    alter(folder)
    said = resume(folder)
    assert said.startswith("CheckpointDamaged") and reported in said
    assert "optimizer.pt" in said or "scheduler.pt" in said


def test_a_file_that_unpacks_to_more_than_it_is(folder: Path) -> None:
    whole = saved(OTHERS["a list"])
    with (
        zipfile.ZipFile(io.BytesIO(whole)) as archive,
        zipfile.ZipFile(folder / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in archive.namelist():
            bomb.writestr(name, archive.read(name))
        bomb.writestr("archive/data/0", bytes(64 << 20))
    said = resume(folder)
    assert "optimizer.pt" in said and "is compressed" in said


def texts() -> dict[str, str]:
    found = {
        name: json.dumps(value) for name, value in OTHERS.items() if type(value) in (int, list)
    }
    return {
        **found,
        "null": "null",
        "no JSON": "{",
        "deep": "[" * 100_000,
        "a step that is a text": '{"global_step": "2"}',
        "a step that is huge": '{"global_step": 1' + "0" * 30 + "}",
        "a step that is true": '{"global_step": true}',
        "a step below zero": '{"global_step": -7}',
        "an epoch that is a text": '{"global_step": 2, "epoch": "1"}',
        "a batch size that is a list": '{"global_step": 2, "train_batch_size": [1]}',
        "a metric beyond floats": '{"global_step": 2, "best_metric": 1' + "0" * 400 + "}",
        "a best one that is a number": '{"global_step": 2, "best_model_checkpoint": 7}',
        "a best one with a null byte": '{"global_step": 2, "best_model_checkpoint": "\\u0000"}',
        "millions of items": '{"log_history": [' + "[]," * 4_000_000 + "[]]}",
        "a history that is none": '{"global_step": 2, "log_history": 7}',
        "callbacks that are none": '{"global_step": 2, "stateful_callbacks": [7]}',
    }


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
@pytest.mark.parametrize("kind", list(texts()))
def test_a_state_that_is_none(folder: Path, kind: str, own: bool, tmp_path: Path) -> None:
    if own:
        ours = both(tmp_path / "own")[0]
        ours.trainer(save_strategy="steps", save_steps=2, max_steps=2).train()
        folder = ours.folder / NAME
    (folder / "trainer_state.json").write_text(texts()[kind])
    assert "trainer_state.json" in resume(folder)


def test_a_state_does_not_steer_the_terminal(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    steers = "\x1b[2J\x1b]0;mine\x07\ud800" + "x" * 100_000
    state = json.loads((folder / "trainer_state.json").read_text())
    state |= {steers: 1, "best_model_checkpoint": steers}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    assert resume(folder) == ""
    said = caplog.text + "".join(capsys.readouterr())
    assert "unknown fields are left out" in said and "is gone" in said
    assert said.replace("\n", "").isprintable() and len(said) < 10_000


INDEXES: dict[str, Any] = {
    "a list": [],
    "no map": {},
    "a map of a list": {"weight_map": [1]},
    "an empty map": {"weight_map": {}},
    "a number": {"weight_map": {"w": 7}},
    "a path out": {"weight_map": {"w": "../../secret.bin"}},
    "an absolute path": {"weight_map": {"w": "/etc/passwd"}},
    "nothing there": {"weight_map": {"w": "model-00001.safetensors"}},
    "the folder": {"weight_map": {"w": ".."}},
    "a pipe": {"weight_map": {"w": "pipe"}},
    "a long name": {"weight_map": {"w": "x" * 1_000_000}},
}


@pytest.mark.parametrize("suffix", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_that_leads_elsewhere(folder: Path, kind: str, suffix: str) -> None:
    canary = folder.parent / "canary"
    (folder.parents[1] / "secret.bin").write_bytes(pickles(canary)["zip"])
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "pipe")
    (folder / f"{suffix}.index.json").write_text(json.dumps(INDEXES[kind]))
    said = resume(folder)
    assert f"{suffix}.index.json" in said and len(said) < 3000
    assert not canary.exists()


SHARDS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a header of exabytes": lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f{"),
    "sparse": lambda path: os.truncate(path, 10 << 30),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to /dev/zero": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_weights_that_are_none(folder: Path, kind: str) -> None:
    SHARDS[kind](folder / "model.safetensors")
    said = resume(folder)
    assert NAME in said and ("model.safetensors" in said or "no weights" in said)


def test_urls_are_refused_and_become_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = both(tmp_path / "run")[0]
    with pytest.raises(ValueError, match="output_dir='s3://bucket/run' is a URL"):
        TrainingArguments(output_dir="s3://bucket/run", use_cpu=True)
    with pytest.raises(ValueError, match="s3://bucket/run: it is a URL; copy it to a folder"):
        ours.trainer().train(resume_from_checkpoint="s3://bucket/run")
    assert not (tmp_path / "s3:").exists()

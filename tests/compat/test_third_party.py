"""TRL's, PEFT's and sentence-transformers' trainers, unmodified, on drivetrain's Trainer: the
losses, gradient norms and evaluations of transformers' own.

Each launch runs several scenarios in one process group (see third_party.py), since importing these
libraries takes longer than training with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("third_party.py")
FINE_TUNING = ("sft", "plain_arguments", "packed", "assistant_only", "lora", "dpo", "reward")
ALL = (*FINE_TUNING, "sentences")
REWARDS = ("grpo", "kto")
TASKS = ("question_answering", "masked_language", "images", "summarisation")
BASES = ("hf", "drivetrain")
SHARDED = {
    "fsdp": ("backend", '"fsdp"'),
    "deepspeed": ("deepspeed", '{"zero_optimization": {"stage": 2}}'),
}


def launch(folder: Path, base: str, scenarios: tuple[str, ...], size: int, *more: str) -> dict:
    """Run the scenarios in `size` processes; what they found, by scenario."""
    folder.mkdir(exist_ok=True)
    out = folder / f"{base}-{size}-{'-'.join(more) and 'more'}.json"
    command = [sys.executable, str(SCRIPT), str(out), base, *scenarios, *more]
    if size > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command[1:1] = torchrun
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=540, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("third_party")


@pytest.fixture(scope="module")
def alone(folder):
    """What one process found, on either base."""
    return launch(folder, "hf", ALL, 1), launch(folder, "drivetrain", ALL, 1)


@pytest.fixture(scope="module")
def two_ranks(folder):
    """What two processes found, on either base."""
    return launch(folder, "hf", ALL, 2), launch(folder, "drivetrain", ALL, 2)


def assert_equal(theirs: dict, ours: dict) -> None:
    assert "drivetrain.compat.trainer.trainer" in ours["base"]
    assert "transformers.trainer" not in ours["base"]
    assert len(ours["losses"]) == 6
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6, abs=1e-8)
    assert ours["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=1e-5)
    assert ours.keys() == theirs.keys()
    if "eval_loss" in theirs:  # a scenario with evaluation data
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6)


@pytest.mark.row("T9", "T11", "T12", "T14", "A7", "N11")
@pytest.mark.parametrize("scenario", ALL)
def test_one_process(alone, scenario):
    assert_equal(alone[0][scenario], alone[1][scenario])


@pytest.fixture(scope="module", params=[1, 2])
def tasks(folder, request):
    """What that many processes found of the other trainers, on either base."""
    size = request.param
    theirs, ours = (launch(folder / "tasks", base, (*REWARDS, *TASKS), size) for base in BASES)
    if size > 1:  # HF multiplies it by the ranks for a model that takes any keywords
        theirs["summarisation"]["eval_loss"] /= size
    return theirs, ours


@pytest.mark.slow
@pytest.mark.row("T1", "A7", "M1")
@pytest.mark.parametrize("scenario", [*REWARDS, *TASKS])
def test_other_trainers_and_tasks(tasks, scenario):
    theirs, ours = (found[scenario] for found in tasks)
    assert_equal(theirs, ours)
    assert ours.get("metrics") == theirs.get("metrics")
    assert ours.get("generated") == theirs.get("generated")
    if scenario == "summarisation":
        assert all(len(set(tokens)) > 1 for tokens in ours["generated"])


@pytest.mark.slow
@pytest.mark.row("T9", "T14", "A5", "X1")
@pytest.mark.parametrize("scenario", ALL)
def test_two_ranks(two_ranks, scenario):
    assert_equal(two_ranks[0][scenario], two_ranks[1][scenario])


@pytest.mark.row("T13")
@pytest.mark.parametrize("ranks", ["alone", pytest.param("two_ranks", marks=pytest.mark.slow)])
def test_what_sft_logs(request, ranks):
    theirs, ours = request.getfixturevalue(ranks)
    for scenario in ("sft", "packed", "lora"):
        for mine, other in zip(ours[scenario]["told"], theirs[scenario]["told"], strict=True):
            assert mine == pytest.approx(other, rel=1e-6)
            assert None not in mine.values()
        assert len(ours[scenario]["told"]) == 7  # six steps, and an evaluation


@pytest.mark.row("T10", status="refused", note="TRL has them in SFTConfig, and max_length")
def test_older_keywords_of_sft(alone):
    theirs, ours = (found["sft"]["older keywords"] for found in alone)
    assert ours == theirs and "dataset_text_field" in ours


@pytest.mark.row("N11")
@pytest.mark.parametrize("ranks", ["alone", pytest.param("two_ranks", marks=pytest.mark.slow)])
def test_adapters_alone_are_saved(request, ranks):
    _, ours = request.getfixturevalue(ranks)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(ours["lora"]["files"])
    assert "model.safetensors" not in ours["lora"]["files"]


@pytest.mark.slow
@pytest.mark.row("X11", "X17")
@pytest.mark.row(
    "X19",
    status="differs",
    note="the kernel's files, from which any driver resumes, and the model file whole in each "
    "stage: nothing has to be gathered by zero_to_fp32.py",
)
@pytest.mark.parametrize("driver", SHARDED)
def test_sharded(folder, two_ranks, driver):
    ours = launch(folder, "drivetrain", ("sft",), 2, "=".join(SHARDED[driver]))["sft"]
    assert_equal(two_ranks[0]["sft"], ours)
    assert {"model.safetensors", "manifest.json"} <= set(ours["files"])

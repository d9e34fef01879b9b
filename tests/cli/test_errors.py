"""An impossible command prints one message, ends with exit code 2, and leaves no files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Drive

from drivetrain.kernel.errors import FailedAfterTraining


def refused(drive: Drive, tmp_path: Path, *arguments: object, code: int = 2) -> str:
    ran = drive("train", *arguments, "--out", "new")
    assert ran.code == code, ran.stdout + ran.stderr
    assert not (tmp_path / "new").exists()
    assert ran.stdout == ""
    assert ran.stderr.count("error: ") == 1
    return ran.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "there is no recipe file"),
        ("x = 1", "has no `recipe`"),
        ("recipe = 3", "it must be a Recipe"),
        ("def recipe():\n    return 3", "it must be a Recipe"),
        ("def recipe(a, b): ...", "must take nothing, or one dataclass"),
        ("settings = 3\ndef recipe(): ...", "it must be a drivetrain.trainer.settings.Settings"),
        (
            "from drivetrain.kernel.contract import Recipe\nrecipe = Recipe(lambda: 0, None)",
            "has no loss",
        ),
    ],
)
def test_recipes(drive: Drive, tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    message = refused(drive, tmp_path, "bad.py")
    assert expected in message
    assert "cli/" not in message  # our own frames are not the user's concern


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 / 0", "1 / 0"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("import nowhere_at_all", 'bad.py", line 1'),
        ("def recipe():\n    return 1 / 0", "line 2, in recipe"),
    ],
)
def test_a_recipe_that_raises_has_failed(
    drive: Drive, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    message = refused(drive, tmp_path, "bad.py", code=1)
    assert expected in message
    assert "cli/" not in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "optimzer.lr=1"], "did you mean optimizer.lr?"),
        (["--set", "optimizer.lrr=1"], "did you mean optimizer.lr?"),
        (["--set", "recipe.widht=1"], "did you mean recipe.width?"),
        (["--set", "backend.treads=1"], "did you mean backend.threads?"),
        (["--set", "steps=many"], "steps is 'many', which is not of type int"),
        (["--set", "recipe.width=wide"], "recipe.width is 'wide'"),
        (["--set", "steps"], "not of the form KEY=VALUE"),
        (["--steps", "0"], "steps is 0"),
        (["--backend", "dpd"], "Did you mean 'ddp'?"),
        (["--nproc", "0"], "--nproc is 0; it must be at least 1"),
        (["--nproc", "100000"], "this machine has"),
        (["--resume", "nowhere"], "nowhere is not a folder"),
        (["--resume", ""], "'' is no path"),
        (["--backend", ""], "no backend is called ''"),
        (["--set", "optimizer.lr=-1"], "optimizer.lr is -1.0"),
        (["--set", "data.workers=5000"], "data.workers is 5000"),
        (["--seed", str(2**70)], "seed is 1180591620717411303424"),
        (["--set", "backend.threads=1000000"], "backend.threads is 1000000"),
        (["--nnodes", "many"], "torchrun refuses --nproc-per-node=1 --nnodes=many"),
        (["--nnodes", "2", "--node-rank", "x"], "invalid int value: 'x'"),
        (["--master-port", "1234"], "give --nproc or --nnodes, too"),
        (["--plan"], "give --nproc, or see `drivetrain plan`"),
        (["--plan", "--nproc", "2", "--nnodes", "2"], "give --nproc, or see `drivetrain plan`"),
        (["--plan", "--nproc", "2", "--backend", "ddp"], "leave --backend ddp out"),
    ],
)
def test_arguments(
    drive: Drive, recipe: Path, tmp_path: Path, words: list[str], expected: str
) -> None:
    assert expected in refused(drive, tmp_path, recipe, *words)


@pytest.mark.parametrize(
    "words",
    [["--backend", "cpu"], ["--set", "sede=1"], ["--backend", "ddp", "--set", "backend.x=1"]],
)
def test_the_launcher_refuses_before_it_starts_a_rank(
    drive: Drive, recipe: Path, tmp_path: Path, words: list[str]
) -> None:
    recipe.write_text("open('started', 'w')")
    refused(drive, tmp_path, recipe, *words, "--nproc", "2")
    assert not (tmp_path / "started").exists()


def test_no_folder_is_not_this_one(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    ran = drive("train", recipe, "--out", "")
    assert ran.code == 2
    assert "'' is no path" in ran.stderr
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_fails_in_its_first_step_leaves_no_folder(
    drive: Drive, recipe: Path, tmp_path: Path, nproc: int
) -> None:
    text = recipe.read_text()
    recipe.write_text(text.replace("** 2).sum()", "** 2)"))
    failed = drive("train", recipe, "--out", "run", "--nproc", nproc)
    assert failed.code == 2
    assert "it must return a scalar" in failed.stderr
    assert not (tmp_path / "run").exists()
    if nproc == 1:
        recipe.write_text(text)
        assert drive("train", recipe, "--out", "run").code == 0


def test_a_folder_in_use_is_left_alone(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").touch()
    ran = drive("train", recipe, "--out", "used")
    assert ran.code == 2
    assert "--resume auto" in ran.stderr
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("out", ["small.py", "small.py/run", "/proc/run"])
def test_a_folder_that_cannot_be_written(drive: Drive, recipe: Path, out: str) -> None:
    ran = drive("train", recipe, "--out", out)
    assert ran.code == 2
    assert out.partition("/run")[0] in ran.stderr


def test_an_error_in_the_user_s_code_is_shown_from_there_on(drive: Drive, recipe: Path) -> None:
    text = recipe.read_text().replace('batch["y"]', 'batch["z"]')
    recipe.write_text(text)
    ran = drive("train", recipe, "--out", "run")
    assert ran.code == 1
    first, title, frame, *_ = ran.stderr.splitlines()
    assert first == "error: KeyError: 'z'"
    assert title == "Traceback (most recent call last):"
    assert frame.endswith('small.py", line 31, in <lambda>')
    assert "sanity.py" not in ran.stderr  # our own frames are not the user's concern
    assert "sanity.py" in drive("train", recipe, "--out", "run2", "--debug").stderr


LEAVES = '__import__("sys").exit(7) or'


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("import torch", "import torch, sys; sys.exit(7)", 1),
        ("model=lambda:", f"model=lambda: {LEAVES}", 1),
        ("module, batch:", f"module, batch: {LEAVES}", 1),
        ('return "a <sample>"', f"return {LEAVES} 0", FailedAfterTraining.exit_code),
    ],
    ids=["loading", "model", "loss", "sample"],
)
def test_sys_exit_in_a_recipe_is_an_error(
    drive: Drive, recipe: Path, before: str, after: str, code: int
) -> None:
    recipe.write_text(recipe.read_text().replace(before, after))
    ran = drive("train", recipe, "--out", "run")
    assert ran.code == code
    assert "sys.exit(7) was called" in ran.stderr and "error: " in ran.stderr
    assert 'small.py", line' in ran.stderr


@pytest.mark.parametrize("fails", ["raise OSError('gone')", "import sys; sys.exit(3)"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_fails_is_the_same_with_and_without_workers(
    drive: Drive, recipe: Path, fails: str, workers: int
) -> None:
    text = recipe.read_text().replace("        return {", f"        {fails}\n        return {{")
    recipe.write_text(text)
    ran = drive("train", recipe, "--out", "run", "--set", f"data.workers={workers}")
    assert ran.code == 1
    assert "(from offset 0 of epoch 0) could not be fetched: " in ran.stderr
    assert 'small.py", line 25, in __getitem__' in ran.stderr
    assert "fetch.py" not in ran.stderr


def test_the_folder_of_a_process_that_left_in_silence_has_no_end(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    text = recipe.read_text()
    recipe.write_text(text.replace("module, batch:", 'module, batch: __import__("os")._exit(0) or'))
    drive("train", recipe, "--out", "run")  # with a code that nobody but its launcher can change
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert '"run_started"' in metrics.read_text() and '"run_ended"' not in metrics.read_text()
    recipe.write_text(text)
    assert drive("train", recipe, "--out", "run", "--resume", "auto").code == 0
    assert '"reason": "finished"' in metrics.read_text()


@pytest.mark.slow
def test_ranks_that_leave_in_silence_have_not_finished(drive: Drive, recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "\nimport os\nif 'RANK' in os.environ: os._exit(0)\n")
    ran = drive("train", recipe, "--out", "run", "--nproc", 2)
    assert ran.code == 1
    assert "2 of 2 processes ended with exit code 0" in ran.stderr


@pytest.mark.parametrize(
    ("there", "here", "code"),
    [
        ("batch: ", "batch: only_here() or ", 1),
        # the other one waits for it where torchrun ends it after half a minute
        pytest.param("settings = ", "only_here()\nsettings = ", 1, marks=pytest.mark.slow),
        # it takes longer to end than the other waits for its call to fail
        pytest.param("batch: ", "batch: in_no_hurry() or ", 1, marks=pytest.mark.slow),
    ],
    ids=["in a step", "in the recipe", "in a step, and ends late"],
)
def test_an_error_on_one_rank_is_reported_once_with_its_rank(
    drive: Drive, recipe: Path, there: str, here: str, code: int
) -> None:
    only_here = """
import os
def only_here():
    if os.environ.get("RANK") == "1":
        raise ValueError("only here")
def in_no_hurry():
    import time
    import torch.distributed as dist
    from drivetrain.backends.process_group import stall_watch
    stall_watch.GRACE_SECONDS = 0.3
    leave = dist.destroy_process_group
    dist.destroy_process_group = lambda: time.sleep(4) or leave()
    only_here()
"""
    recipe.write_text(only_here + recipe.read_text().replace(there, here, 1))
    ran = drive("train", recipe, "--out", "run", "--nproc", 2)
    assert ran.code == code
    assert ran.stderr.count("ValueError: only here") == 1, ran.stderr
    first, said = ran.stderr.split("error (rank 1):")
    assert "ValueError: only here" in said and "rank 0" not in first and "Thread" not in ran.stderr


@pytest.mark.slow  # two ranks that a launcher starts and ends
def test_the_other_ranks_report_why_a_rank_ended(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    """Require the error in the report that rank 0 writes, which is that of the first
    rank to fail.
    """
    recipe.write_text(
        recipe.read_text()
        + """
import os
fetched, fetch = 0, Points.__getitem__
def until_the_fifth_step(self, index):
    global fetched
    fetched += 1
    if fetched == 9 and os.environ.get("RANK") == "1":
        raise ValueError("only here")
    return fetch(self, index)
Points.__getitem__ = until_the_fifth_step
"""
    )
    alone = "evaluate.sanity_check=false"  # which would fetch samples, too
    ran = drive("train", recipe, "--out", "run", "--nproc", 2, "--set", alone)
    assert ran.code == 1 and "stands still" not in ran.stderr  # nobody waited for its time to end
    assert "error (rank 1): " in ran.stderr and "error (rank 0): " not in ran.stderr
    assert ran.stderr.count("ValueError: only here") == 1, ran.stderr
    reported = (tmp_path / "run" / "report.html").read_text()
    assert re.search(
        r"CollectiveFailed: rank 0 .* Rank 1 ended by .*ValueError: only here", reported
    )


def test_an_error_on_all_ranks_is_reported_once(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    ran = drive("train", recipe, "--out", "run", "--nproc", 2, "--set", "sede=1")
    assert ran.code == 2
    assert ran.stderr.count("unknown setting sede") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x', which is not a number"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x', which is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2, and no MASTER_ADDR"),
    ],
)
def test_an_environment_of_no_launcher_is_refused(
    drive: Drive, recipe: Path, environment: dict[str, str], words: str
) -> None:
    ran = drive("train", recipe, "--backend", "ddp", "--out", "new", **environment)
    assert ran.code == 2 and words in " ".join(ran.stderr.split()), ran.stderr


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("module, batch:", "batch:", "recipe.loss takes (batch), and is called as loss(module,"),
        ("train_data=Points", "train_data=[] and Points", "train_data holds no samples: it is a"),
        ('return {"x"', '_ = {"x"', "error: sample 0 is None: does its __getitem__ return it?"),
    ],
)
def test_parts_of_a_recipe_are_named(
    drive: Drive, recipe: Path, before: str, after: str, words: str
) -> None:
    text = recipe.read_text()
    assert before in text
    recipe.write_text(text.replace(before, after))
    ran = drive("train", recipe, "--out", "new")
    assert ran.code and words in " ".join(ran.stderr.split()), ran.stderr

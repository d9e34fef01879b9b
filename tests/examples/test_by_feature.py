"""Each example of a feature runs, and prints what its first lines promise."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "by_feature"

Names = dict[str, Any]


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)


SHOWS: dict[str, Callable[[Names], bool]] = {
    "activation_checkpointing": lambda n: close(n["kept"].loss, n["again"].loss),
    "actor_critic": lambda n: n["result"].metrics["held_out"]["paid"] > 0.75,
    "base": lambda n: n["result"].step == 40 and n["result"].metrics["held_out"]["loss"] < 0.5,
    "best_checkpoint": lambda n: 1 <= len(n["left"]) <= 2,
    "evaluate": lambda n: n["again"] == n["trained"].metrics,
    "export_weights": lambda n: n["weights"]["0.weight"].shape == (32, 8),
    "gradient_accumulation": lambda n: close(n["whole"].loss, n["parts"].loss),
    "length_buckets": lambda n: n["shares"]["by length"] < n["shares"]["shuffled"] / 2,
    "lora": lambda n: n["weights"].keys() == n["recipe"].model().state_dict().keys(),
    "loss_spikes": lambda n: (
        [type(event).__name__ for event in n["events"][:2]] == ["LossSpiked", "RolledBack"]
        and n["result"].reason == "finished"
        and n["result"].loss < 1
    ),
    "metrics": lambda n: n["result"].metrics["held_out"]["accuracy"] > 0.5,
    "mixture": lambda n: n["mixture"].drawn(n["samples"]) == {"small": 197, "large": 1003},
    "mixed_precision": lambda n: n["result"].loss < 0.69,
    "observers": lambda n: n["result"].reason == "stopped" and n["losses"][-1] < n["losses"][0],
    "own_loader": lambda n: n["result"].step == 40,
    "own_optimizer": lambda n: n["result"].loss < 0.7,
    "own_step": lambda n: n["result"].loss < 1,
    "packing": lambda n: n["result"].loss < 3.5,
    "predict": lambda n: n["outputs"].shape == (100, 2),
    "profiling": lambda n: n["written"] == ["steps-5-6.rank-0.json.gz"],
    "resume": lambda n: n["second"].metrics == n["uninterrupted"].metrics and n["first"].step == 20,
    "resume_elsewhere": lambda n: (n["first"].step, n["second"].step) == (20, 40),
    "save_in_background": lambda n: [event.step for event in n["saves"]] == [10, 20, 30, 40],
    "schedules": lambda n: n["rates"][0] < n["rates"][3] > n["rates"][-1],
    "several_data_sets": lambda n: list(n["result"].metrics) == ["held_out", "left_out"],
    "several_models": lambda n: (
        (n["result"].finish.argmax(-1) == n["labels"]).float().mean() > 0.8
        and n["result"].loss < 0.2
    ),
    "streaming": lambda n: (n["first"].step, n["more"].step) == (7, 20),
    "trackers": lambda n: any(Path("runs/tracked").rglob("events.out.tfevents.*")),
}


def test_each_example_is_run() -> None:
    assert sorted(SHOWS) == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", SHOWS)
@pytest.mark.filterwarnings("default")
def test_a_feature(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    names = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert SHOWS[name](names), shown
    assert shown.strip()

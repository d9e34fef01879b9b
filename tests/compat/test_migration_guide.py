"""The samples of docs/from-hf-trainer.md run in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "from-hf-trainer.md"
SAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("default")
def test_every_sample_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(SAMPLES) >= 7
    names: dict = {"__name__": "guide"}
    for number, sample in enumerate(SAMPLES):
        exec(compile(sample, f"{GUIDE.name}, sample {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert names["resumed"].state.global_step == 72
    assert names["trainer"].evaluate()["eval_accuracy"] > 0.8
    assert names["patient"].state.global_step <= 48
    assert shown.splitlines()[-1] == "True"

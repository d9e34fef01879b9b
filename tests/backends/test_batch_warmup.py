"""A growing global batch: every driver takes the steps of one process, and any driver
resumes it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layouts import of_layout

from drivetrain.conformance.judge import require_close, require_same
from drivetrain.conformance.resuming import STEPS, record, recorded

GROWING = {
    "data.batch_warmup": 6,
    "data.batch_warmup_from": 2,
    "optimizer.name": "torch.optim.SGD",
    "max_grad_norm": None,
}
SIZES = [2, 2, 4, 4, 6, 4, 6, 8, 8]
"""The first epoch ends after the sixth step, before the batch has grown."""

OTHERS = (
    "ddp:2",
    "fsdp:2",
    "mesh:2,tensor=2",
    "mesh:2,pipeline=2",
    "deepspeed:2,stage=2",
    "deepspeed:2,stage=3",
    "xla",
    "ipex",
)


@pytest.mark.slow  # a law lets the batch grow on each driver in each run: fit_equals_one_process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", OTHERS)
def test_each_driver_takes_the_steps_of_one_process(driver: str, tmp_path: Path) -> None:
    """Compare the steps with one process's, and resume there and back in another world while the
    batch still grows.
    """
    here, there = of_layout("cpu"), of_layout(driver)
    how = {"problem": "regression", "settings": GROWING}
    straight = recorded(here, **how)
    assert [len(ids) for ids in straight["ids"]] == SIZES

    def saved(run: dict[str, str], step: int) -> str:
        return run["checkpoint"].replace(f"{STEPS:06}", f"{step:06}")

    runs = {0: record(there, f"{tmp_path}/0", **how)}
    runs[3] = record(there, f"{tmp_path}/3", resume=saved(straight, 3), **how)
    runs[5] = record(here, f"{tmp_path}/5", resume=saved(runs[3], 5), **how)
    for step, run in runs.items():
        require_same("samples of each step", run["ids"], straight["ids"][step:])
        losses = [[line["loss"] for line in reported["logged"]] for reported in (run, straight)]
        require_close("loss", losses[0], losses[1][step:], 3e-7)
        for name, tensor in straight["state"]["weights"].items():
            torch.testing.assert_close(run["state"]["weights"][name], tensor, rtol=0, atol=3e-7)

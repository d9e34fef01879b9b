"""HF's Trainer on an accelerator that is none of CUDA's or Intel's: it trains there by default."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, torch
from torch import nn
from drivetrain.conformance.simulated_device import register
from drivetrain.compat import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        output = self.layer(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}

if sys.argv[1] == "sim":
    register()
torch.manual_seed(0)
rows = [{"x": row, "labels": row.sum()[None]} for row in torch.randn(32, 4)]
args = TrainingArguments(
    sys.argv[2], num_train_epochs=2, per_device_train_batch_size=8, report_to=[], save_steps=4,
    eval_strategy="epoch", disable_tqdm=True, logging_steps=2,
)
trainer = Trainer(Model(), args, train_dataset=rows, eval_dataset=rows)
loss = trainer.train().training_loss
print(json.dumps([trainer.args.device.type, loss, trainer.evaluate()["eval_loss"]]))
"""


@pytest.mark.slow
def test_it_trains_there_as_on_the_cpu(tmp_path: Path) -> None:
    seen = {}
    for device in ("sim", "cpu"):
        command = [sys.executable, "-c", SCRIPT, device, str(tmp_path / device)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found, *losses = json.loads(done.stdout.splitlines()[-1])
        assert found == device
        seen[device] = losses
    assert seen["sim"] == pytest.approx(seen["cpu"], rel=1e-6)

"""Parameters that a callback unfreezes during a run are clipped and counted as by transformers'
Trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import LIBRARIES
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return {"loss": ((out - labels) ** 2).mean() * 4, "logits": out}


def trained(name: str, out: Path, given: bool) -> tuple[list[float], dict[str, Tensor]]:
    library = LIBRARIES[name]
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    rows = [{"x": a, "labels": b} for a, b in zip(x, x.sum(1, keepdim=True).sin(), strict=True)]
    model = Net()
    model.b.requires_grad_(False)

    class Thaw(library.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                model.b.requires_grad_(True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = library.Trainer(
        model=model,
        args=library.TrainingArguments(
            output_dir=str(out / name),
            max_steps=6,
            per_device_train_batch_size=8,
            learning_rate=0.05,
            optim="sgd",
            lr_scheduler_type="constant",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            train_sampling_strategy="sequential",
            max_grad_norm=0.5,
            log_level="error",
        ),
        train_dataset=rows,
        callbacks=[Thaw()],
        optimizers=(optimizer, constant) if given else (None, None),
    )
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    return norms, {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("given", [True, False], ids=["in the optimizer", "not in the optimizer"])
def test_what_is_thawed_is_clipped_and_counted(given: bool, tmp_path: Path) -> None:
    ours, theirs = (trained(name, tmp_path, given) for name in LIBRARIES)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for key, expected in theirs[1].items():
        assert torch.allclose(ours[1][key], expected, atol=1e-6), key

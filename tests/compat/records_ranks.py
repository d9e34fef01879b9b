"""Jobs of two processes: records of a run, a replay of one of its steps, and an odd count."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from side_by_side import classifier
from test_compat_records import trainer

from drivetrain import compat
from drivetrain.conformance.bench import Bench


def trained(bench: Bench, *, folder: str, **given: Any) -> dict[str, Any]:
    """Train; return the exit code of a replay, or None, and what was printed."""
    made, printed = trainer(folder, **given), io.StringIO()
    code = None
    try:
        with contextlib.redirect_stdout(printed):
            made.train()
    except SystemExit as ended:
        code = ended.code
    finally:
        made.end()
    return {"code": code, "printed": printed.getvalue()}


class Odd(compat.Trainer):
    """A Trainer that counts the samples of all ranks as one."""

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(args.gradient_accumulation_steps)


def odd(bench: Bench, *, folder: str, **given: Any) -> bool:
    """Train; return whether the weights have changed."""
    made = trainer(folder, kind=Odd, **given)
    made.train()
    weight = made.model.inner.weight.detach().clone()
    made.end()
    return not torch.equal(weight, classifier().inner.weight)

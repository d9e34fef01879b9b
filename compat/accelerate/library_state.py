"""accelerate's own state, which its functions and loggers require beside a Trainer."""

from __future__ import annotations

import sys
from typing import Any

from ..arguments.processes import partial_state

__all__ = ["start_library_state"]


def start_library_state(args: Any) -> None:
    """Create accelerate's state, if accelerate is loaded and has none, as transformers' Trainer
    does: libraries call accelerate's `set_seed`, `gather` and loggers. The state joins the driver's
    process group.
    """
    module = sys.modules.get("accelerate.state")
    if module is None or module.AcceleratorState._shared_state:
        return
    from accelerate.utils import TorchDynamoPlugin

    partial_state(args)
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    module.AcceleratorState(
        mixed_precision=precision,
        cpu=args.device.type == "cpu",
        dynamo_plugin=TorchDynamoPlugin(),
        _from_accelerator=True,
    )

"""accelerate's own state, which its functions and loggers want beside a Trainer."""

from __future__ import annotations

import sys
from typing import Any

from ..arguments.processes import partial_state

__all__ = ["start_library_state"]


def start_library_state(args: Any) -> None:
    """Make it where accelerate is loaded and has none, as a Trainer of transformers does: libraries
    call its `set_seed`, `gather` and loggers. It joins the process group of the driver.
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

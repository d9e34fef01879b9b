"""Liger's Triton kernels in place of a model's layers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from importlib import import_module

import torch
from torch import nn

from ..common.inspection import unwrap_peft

__all__ = ["apply_liger_kernel"]

_log = logging.getLogger(__name__)


def apply_liger_kernel(model: nn.Module, kernel_config: Mapping[str, bool] | None = None) -> None:
    """Replace layers of a transformers model by Liger's; `kernel_config` selects them.

    Other models are not changed, with a warning. Raises ImportError without the package, and
    RuntimeError without an accelerator, for which Triton could compile.
    """
    try:
        liger = import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ImportError(
            f"use_liger_kernel=True needs liger-kernel, which cannot be imported ({error});"
            " install it: pip install liger-kernel"
        ) from error
    if not torch.accelerator.is_available():
        raise RuntimeError(
            "use_liger_kernel=True: Liger's kernels are compiled by Triton for a GPU, and there"
            " is none here; set use_liger_kernel=False"
        )
    transformers = sys.modules.get("transformers")
    base = unwrap_peft(model)
    if transformers is None or not isinstance(base, transformers.PreTrainedModel):
        _log.warning("%s is not a model of transformers: Liger does not change it", type(base))
        return
    liger._apply_liger_kernel_to_instance(model=base, **(kernel_config or {}))

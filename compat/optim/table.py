"""The optimizers by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from .lowrank import LOW_RANK
from .quantized import QUANTIZED
from .request import OptimArgs, Request
from .torch_optim import TORCH_OPTIM

__all__ = ["OPTIMIZERS", "optimizer_class_and_kwargs"]

OPTIMIZERS = {**TORCH_OPTIM, **QUANTIZED, **LOW_RANK}
"""The builders of optimizers, by the name that `optim` takes."""

_GONE = {
    "adamw_apex_fused": "Apex is not maintained; optim='adamw_torch_fused' is as fast",
    "adamw_hf": "transformers no longer has it; optim='adamw_torch' is the same algorithm",
}


def optimizer_class_and_kwargs(args: Any, model: nn.Module | None) -> tuple[Any, dict[str, Any]]:
    """Return the class that `args.optim` names, and its keywords.

    The keywords may also hold the parameters: as `params` (groups), as `model`, or as
    `optimizer_dict` (see `layerwise`). Raises ValueError for an unknown name, for `optim_args` that
    are malformed or that the optimizer does not have, and for an unsuitable model; ImportError,
    with the command that installs it, for a missing library.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name in _GONE:
        raise ValueError(f"optim={name!r} is gone: {_GONE[name]}")
    if name not in OPTIMIZERS:
        raise ValueError(f"optim={name!r} is not known; known are {', '.join(sorted(OPTIMIZERS))}")
    options = OptimArgs(args.optim_args)
    built = OPTIMIZERS[name](Request(name, args, model, options))
    if options.unread:
        raise ValueError(
            f"optim={name!r} has no {', '.join(sorted(options.unread))}, which optim_args gives"
        )
    return built

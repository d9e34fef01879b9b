"""How a driver may partition a model of transformers, by the model's own plans.

The driver partitions layers by the model's `tp_plan`. This module plans sequences and experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...data.parallel import Parallel
from ..common.inspection import unwrap_peft
from ..common.loss import loss_shifts_labels
from ..data.sequences import DIMENSIONS, POSITIONS, WholeSequences
from ..errors import ArgumentRefused
from ..parts import TrainerParts

__all__ = ["partition_plan", "whole_sequences"]


def partition_plan(trainer: TrainerParts) -> Parallel | None:
    """Return the partition plan; None if nothing is partitioned. Raises `ArgumentRefused`, with the
    remedy, for what would not train as the whole model does.
    """
    along, model = trainer.driver_session.ranks_along, unwrap_peft(trainer.model)
    sequences, experts = along("context") > 1, _experts(model)
    if along("expert") > 1 and not experts:
        raise ArgumentRefused(
            "backend_options['expert']",
            trainer.driver_session.driver.name,
            f"{type(model).__name__} has no ep_plan that names modules of stacked experts. Leave "
            "the option out, or train by drivetrain.fit, whose recipe names them",
        )
    if along("tensor") > 1 and not getattr(model, "tp_plan", None):
        raise ArgumentRefused(
            f"layers of {type(model).__name__} partitioned over {along('tensor')} ranks",
            trainer.driver_session.driver.name,
            f"{type(model).__name__} has no tp_plan. Set parallelism_config's tp_size to 1, or "
            "train by drivetrain.fit, whose recipe says how layers are partitioned",
        )
    for what, why in _unfit(trainer, model) if sequences else ():
        raise ArgumentRefused(
            f"{what} with sequences that are split over ranks",
            trainer.driver_session.driver.name,
            f"{why}; or set parallelism_config's cp_size and sp_size to 1",
        )
    if along("pipeline") > 1 and _keeps_router_logits(model):
        raise ArgumentRefused(
            "output_router_logits with backend_options['pipeline']",
            trainer.driver_session.driver.name,
            "blocks keep them aside for the loss, and stages hand on activations alone. Set "
            "model.config.output_router_logits=False, or leave the option out",
        )
    if max(along(name) for name in ("context", "expert", "tensor", "pipeline")) == 1:
        return None
    prefix = "" if model is trainer.model else "*"
    return Parallel(
        experts=[prefix + pattern for pattern in experts],
        sequence=DIMENSIONS if sequences else {},
        positions=POSITIONS if sequences else "",
    )


def whole_sequences(trainer: TrainerParts) -> WholeSequences | None:
    """Return the preparation of batches before their sequences are partitioned; None if they are
    not.
    """
    parts = trainer.driver_session.ranks_along("context")
    if parts == 1:
        return None
    config = _text_config(trainer.model)
    limits = [getattr(config, "attention_chunk_size", None)]
    if getattr(config, "use_sliding_window", True):
        limits.append(getattr(config, "sliding_window", None))
    return WholeSequences(parts, min((limit for limit in limits if limit), default=None))


def _experts(model: nn.Module) -> list[str]:
    """Return patterns of the modules whose weights the model's own plan partitions by expert."""
    plan = getattr(model, "ep_plan", None) or {}
    names = (name.rpartition(".")[0] for name, how in plan.items() if how == "grouped_gemm")
    return [*dict.fromkeys(names)]


def _unfit(trainer: TrainerParts, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield features that need whole sequences outside of attention, or unshifted labels, each with
    the reason or the remedy.
    """
    args, config = trainer.args, _text_config(model)
    if not (loss_shifts_labels(model) and trainer.model_accepts_loss_kwargs):
        yield (
            "a loss other than the causal one of transformers",
            "labels must be shifted before sequences are split, and losses be sums over positions",
        )
    if POSITIONS not in inspect.signature(model.forward).parameters:
        yield (
            f"a model whose forward takes no {POSITIONS}",
            "a part of a sequence needs its positions",
        )
    if (attention := getattr(config, "_attn_implementation", None)) != "sdpa":
        yield (
            f"attn_implementation={attention!r}",
            "load the model with attn_implementation='sdpa'",
        )
    if _keeps_router_logits(model):
        yield (
            "output_router_logits",
            "it multiplies means over all tokens. Set model.config.output_router_logits=False",
        )
    if trainer.compute_loss_func is not None:
        yield (
            "compute_loss_func",
            "it would be given parts of the labels, and shift them by itself. Leave it out",
        )
    if trainer.label_smoother is not None:
        yield "label_smoothing_factor", "it shifts labels by itself. Leave it out"
    if trainer.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha", "its noise depends on how long sequences are. Leave it out"
    asked = args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)
    if asked or any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        yield (
            "gradient_checkpointing",
            "set fsdp_config={'activation_checkpointing': True} and fsdp=True: the driver does it",
        )
    if args.include_num_input_tokens_seen == "non_padding":
        yield (
            "include_num_input_tokens_seen='non_padding'",
            "masks are gone when tokens are counted. Set it to 'all'",
        )


def _keeps_router_logits(model: nn.Module) -> bool:
    return bool(getattr(_text_config(model), "output_router_logits", False))


def _text_config(model: Any) -> Any:
    config = getattr(unwrap_peft(model), "config", None)
    of_text = getattr(config, "get_text_config", None)
    return config if of_text is None else of_text()

"""The differences between transformers 4.47 and 5.23, for `profile="4.47"`.

Each difference is a field, with the value for 5.23 unless a profile overrides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PROFILES", "Profile", "profile_of"]


@dataclass(frozen=True)
class Profile:
    """The behaviour of one version of transformers."""

    # --- arguments
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with another default."""
    names_run_by_folder: bool = False
    """`run_name` defaults to `output_dir`; in 5.23 trackers choose a name themselves."""
    default_trackers: str = "none"
    """The meaning of `report_to=None`; in 4.47 that was everything installed."""
    bf16_needs_hardware: bool = True
    """`bf16` is refused if no device computes in it, unless the CPU was selected."""

    # --- the model
    model_beside_model_init: bool = False
    """`model` and `model_init` may both be given, with a warning, although only one is trained."""
    switches_cache_off: bool = True
    """The model's cache of keys and values follows `use_cache`: training has no use for it."""
    decays_by_name: bool = True
    """Weight decay detects norms by parameters' names; else by the classes of their modules."""
    builds_optimizer_and_schedule_at_once: bool = False
    """`create_optimizer_and_scheduler` is called; in 5.23 the driver only requests the
    optimizer."""

    # --- the loss
    counts_predicted_labels: bool = True
    """A causal loss is divided by the labels that a position predicts, without each first one."""
    counts_items_in_evaluation: bool = True
    """Evaluation divides a loss as training does."""
    ends_epochs_with_short_update: bool = True
    """The batches left at an epoch's end make an update of their own."""

    # --- logs
    rounds_loss: bool = False
    """The loss is logged with four decimals, which hides small differences."""
    logs_unclipped_grad_norm: bool = True
    """The gradient norm is logged even where `max_grad_norm` does not clip."""
    logs_rate_of_update: bool = True
    """The logged learning rate is the one that the update used, not that of the next update."""
    model_counts_operations: bool = False
    """The model's own `floating_point_ops` is used."""

    # --- evaluation and checkpoints
    evaluates_last_step: bool = True
    """The last step is evaluated even if no evaluation is due."""
    names_best_early: bool = False
    """The best checkpoint is named before it is written."""
    rotates_by_time: bool = True
    """The oldest checkpoint is the one changed first; else the one with the smallest number."""
    resumes_batch_size: bool = False
    """A resumed run takes the checkpoint's batch size, not only one that `auto_find_batch_size`
    found."""


PROFILES = {
    "5.23": Profile(),
    "4.47": Profile(
        defaults={
            "optim": "adamw_torch",
            "average_tokens_across_devices": False,
            "report_to": "all",
        },
        names_run_by_folder=True,
        default_trackers="all",
        bf16_needs_hardware=False,
        model_beside_model_init=True,
        switches_cache_off=False,
        decays_by_name=False,
        builds_optimizer_and_schedule_at_once=True,
        counts_predicted_labels=False,
        counts_items_in_evaluation=False,
        ends_epochs_with_short_update=False,
        rounds_loss=True,
        logs_unclipped_grad_norm=False,
        logs_rate_of_update=False,
        model_counts_operations=True,
        evaluates_last_step=False,
        names_best_early=True,
        rotates_by_time=False,
        resumes_batch_size=True,
    ),
}
"""By the values of the argument `profile`."""


def profile_of(args: Any) -> Profile:
    """Return the profile that the arguments select; arguments of other libraries select none."""
    return PROFILES.get(getattr(args, "profile", ""), PROFILES["5.23"])

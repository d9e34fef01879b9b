"""The names of HF's arguments, for sentences that name settings of the native trainer."""

from __future__ import annotations

__all__ = ["in_hf_terms"]

_HF_TERMS = {
    "`data.workers=": "`dataloader_num_workers=",
    "`evaluate.every`": "`eval_steps`",
    "measure a part by `evaluate.max_batches`": "evaluate on a part of `eval_dataset`",
    "`checkpoint.every`": "`save_steps`",
    ", or set `checkpoint.background=true`": "",
    "data.workers": "dataloader_num_workers",
    "micro_batch": "per_device_train_batch_size",
    "activation_checkpointing": "gradient_checkpointing=True",
    "precision=bf16": "bf16=True",
    "(optimizer.name)": "(`optim`)",
    "in the options of the backend": "in backend_options",
    "set backend.stage=3": "set stage 3 in deepspeed",
    "set backend.cpu_offload=true": "set cpu_offload in fsdp_config",
    "backend.config": "deepspeed",
    "(backend.spmd)": "(backend_options)",
    "set stats.every=0": "set stats_steps=None",
    "stats.activations": "stats_activations",
    "compile=true": "torch_compile=True",
    "digests=weights, the default, and a log_every that is reached": (
        "run_records=True and logging_steps that are reached"
    ),
    "Steps are recorded each log_every": "Steps are recorded each logging_steps",
    "Train both with the same log_every": "Train both with the same logging_steps",
    "checkpoint.every and checkpoint.keep_last": "save_steps and save_total_limit",
    "give the folder that `--out` named": "train with run_records=True first",
    "--detect-anomaly names": "torch.autograd.set_detect_anomaly(True) names",
    "recipe.loss": "compute_loss",
}
"""Longer names come before the names that they contain."""


def in_hf_terms(text: str) -> str:
    """Replace the names of settings by those of HF's arguments."""
    for ours, theirs in _HF_TERMS.items():
        text = text.replace(ours, theirs)
    return text

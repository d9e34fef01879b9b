"""Writes docs/compat-arguments.md: what each driver does with each argument of compat's Trainer.

    python docs/compat_arguments.py

Each argument is given a value that is not its default, on each driver in turn, as a user would.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drivetrain.compat import Seq2SeqTrainingArguments
from drivetrain.compat.arguments import backend
from drivetrain.registry import find_driver, known_backends

PAGE = Path(__file__).with_name("compat-arguments.md")

SCRIPTS_ONLY = ("do_train", "do_eval", "do_predict", "resume_from_checkpoint")
"""Read by scripts; the Trainer receives these as arguments of its methods."""

_MODULES: dict[str, str] = {
    "accelerate/accelerator.py": "accelerator_config",
    "arguments/backend.py": """backend backend_options bf16 ddp_timeout deepspeed fp16 fp8 fsdp
        local_rank max_grad_norm stall_seconds torch_compile torch_compile_backend
        torch_compile_mode use_cpu""",
    "arguments/derived.py": """log_level log_level_replica log_on_each_node
        per_device_eval_batch_size per_device_train_batch_size save_on_each_node warmup_steps""",
    "arguments/fsdp.py": "fsdp_config",
    "arguments/options.py": """ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
        ddp_find_unused_parameters ddp_static_graph sortish_sampler""",
    "arguments/parallelism.py": "parallelism_config",
    "arguments/resolve.py": "tf32",
    "callbacks/flow_callbacks.py": """eval_delay eval_strategy logging_first_step logging_strategy
        save_strategy""",
    "callbacks/jit_checkpoint.py": "enable_jit_checkpoint",
    "callbacks/state.py": "eval_steps logging_steps save_steps",
    "common/debugging.py": "debug",
    "integrations/trackers.py": """disable_tqdm project report_to run_name trackio_bucket_id
        trackio_space_id trackio_static_space_id""",
    "optim/lowrank.py": "optim_target_modules",
    "optim/request.py": "adam_beta1 adam_beta2 adam_epsilon learning_rate",
    "optim/table.py": "optim optim_args",
    "profile.py": "profile",
    "trainer/between_steps.py": "greater_is_better metric_for_best_model",
    "trainer/diagnostics.py": "find_nonfinite memory_parts run_records stats_steps",
    "trainer/evaluation.py": """batch_eval_metrics eval_accumulation_steps eval_do_concat_batches
        eval_use_gather_object include_for_metrics prediction_loss_only""",
    "trainer/hub.py": """hub_always_push hub_model_id hub_private_repo hub_revision
        hub_strategy hub_token""",
    "trainer/finalizing.py": "load_best_model_at_end",
    "trainer/loading.py": """data_seed dataloader_drop_last dataloader_in_order
        dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
        dataloader_pin_memory dataloader_prefetch_factor length_column_name remove_unused_columns
        train_sampling_strategy""",
    "trainer/optimization.py": "lr_scheduler_kwargs lr_scheduler_type weight_decay",
    "trainer/preparation.py": """activation_checkpointing activation_checkpointing_kwargs
        bf16_full_eval fp16_full_eval gradient_checkpointing gradient_checkpointing_kwargs
        liger_kernel_config use_liger_kernel""",
    "trainer/parameter_statistics.py": "stats_activations",
    "trainer/replay.py": "replay_step",
    "trainer/reporting.py": "include_num_input_tokens_seen",
    "trainer/resuming.py": "restore_callback_states_from_checkpoint resume_hyper_parameters",
    "trainer/saving.py": "checkpoint_format save_only_model save_total_limit",
    "trainer/seq2seq.py": """generation_config generation_max_length generation_num_beams
        predict_with_generate""",
    "trainer/step_callbacks.py": "logging_nan_inf_filter",
    "trainer/time_parts.py": "find_synchronisations time_parts",
    "trainer/trainer.py": """full_determinism label_names label_smoothing_factor
        neftune_noise_alpha output_dir push_to_hub seed skip_memory_metrics use_cache""",
    "trainer/training.py": """auto_find_batch_size eval_on_start gradient_accumulation_steps
        ignore_data_skip max_steps num_train_epochs preemption_notice""",
    "trainer/training_step.py": "average_tokens_across_devices torch_empty_cache_steps",
}

APPLIED_BY: dict[str, str] = {
    name: module for module, names in _MODULES.items() for name in names.split()
}
"""Argument -> the module of `drivetrain.compat` that applies it, or that hands it on. What a driver
does with it, `backend` is asked."""

STEPS = {"eval_strategy": "steps", "eval_steps": 10}
EXAMPLES: dict[str, Any] = {
    "accelerator_config": {"split_batches": True},
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "dataloader_multiprocessing_context": "spawn",
    "ddp_backend": "mpi",
    "debug": "tpu_metrics_debug",
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "eval_strategy": "epoch",
    "fsdp": True,
    "fsdp_config": {"cpu_offload": True},
    "generation_config": "a-model",
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "greater_is_better": True,
    "hub_strategy": "end",
    "include_for_metrics": ["inputs"],
    "include_num_input_tokens_seen": "all",
    "label_names": ["labels"],
    "liger_kernel_config": {"rope": True},
    "local_rank": 0,
    "log_level": "info",
    "log_level_replica": "error",
    "logging_strategy": "epoch",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.5,
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "optim_target_modules": ["q_proj"],
    "parallelism_config": SimpleNamespace(tp_size=2),
    "preemption_notice": ["signal:SIGUSR2"],
    "profile": "4.47",
    "checkpoint_format": "hf",
    "report_to": ["tensorboard"],
    "resume_hyper_parameters": "arguments",
    "save_strategy": "no",
    "stats_activations": ["layers.*"],
    "tf32": False,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "reduce-overhead",
    "train_sampling_strategy": "sequential",
    "warmup_steps": 0.1,
}
"""Values for arguments whose type alone does not give one."""

COMPANIONS: dict[str, dict[str, Any]] = {
    "ddp_backend": {"use_cpu": True},  # or the answer would depend on the machine
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "fsdp_config": {"fsdp": True},
    "load_best_model_at_end": {"save_strategy": "no"},
    "run_name": {"report_to": ["tensorboard"]},
    "stats_activations": {"stats_steps": 7},
}
"""Other arguments that an argument needs to be accepted."""


def example(item: dataclasses.Field[Any]) -> Any:
    """A value of the right type that is not the default."""
    if item.name in EXAMPLES:
        return EXAMPLES[item.name]
    if isinstance(item.default, bool):
        return not item.default
    if isinstance(item.default, float):
        return item.default / 2 or 0.5
    if isinstance(item.default, int):
        return item.default + 1 if item.default >= 0 else 5
    kind = str(item.type)
    for word, value in (("bool", True), ("int", 7), ("float", 0.5), ("str", "text")):
        if word in kind:
            return value
    raise TypeError(f"give {item.name} ({kind}) an example")


def answer(driver: str, item: dataclasses.Field[Any]) -> str:
    """`applied`, `no effect: ` and the reason, or `refused: ` and the reason."""
    if item.name == "backend":
        return "applied"
    given = {
        "output_dir": "out",
        "backend": driver,
        **COMPANIONS.get(item.name, {}),
        item.name: example(item),
    }
    if item.name == "backend_options":
        options = dataclasses.fields(find_driver(driver).options_type)
        given["backend_options"] = {options[0].name: options[0].default}
    try:
        with several_processes(find_driver(driver)):
            args = Seq2SeqTrainingArguments(**given)
            notes = [note for note in backend.notes(args, driver) if item.name in note]
    except ValueError as error:
        return f"refused: {error}"
    return f"no effect: {notes[0].partition(': ')[2]}" if notes else "applied"


@contextmanager
def several_processes(driver: Any) -> Iterator[None]:
    """Two processes by the environment, where the driver can have them."""
    plan = backend.settings(Seq2SeqTrainingArguments("out", backend=driver.name)).plan()
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    before = {name: os.environ.pop(name, None) for name in names}
    if driver.capabilities(plan).multi_process:
        os.environ.update(zip(names, ("2", "0", "0"), strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def shipped() -> list[str]:
    """The drivers of this repository, whatever else is installed."""
    drivers = [find_driver(name) for name in known_backends()]
    return [d.name for d in drivers if type(d).__module__.startswith("drivetrain.backends.")]


@functools.cache
def rows() -> tuple[tuple[dataclasses.Field[Any], dict[str, str]], ...]:
    """Return each argument with the answer of each driver."""
    return tuple(
        (item, {driver: answer(driver, item) for driver in shipped()})
        for item in dataclasses.fields(Seq2SeqTrainingArguments)
    )


def page() -> str:
    """The text of docs/compat-arguments.md."""
    lines = [
        "# Arguments of `drivetrain.compat`",
        "",
        "Generated by `python docs/generate.py compat-arguments`; a test compares it with the",
        "code. Each argument is applied on every driver unless a line says which refuse it, or",
        "where it has no effect and the log says so.",
        "",
        "| argument | tried with | applied by | on other terms |",
        "|---|---|---|---|",
    ]
    for item, answers in rows():
        by = "scripts" if item.name in SCRIPTS_ONLY else f"`{APPLIED_BY[item.name]}`"
        tried = "the driver's own" if item.name.startswith("backend") else repr(example(item))
        lines.append(f"| `{item.name}` | `{tried}` | {by} | {terms(answers)} |")
    return "\n".join(lines) + "\n"


def terms(answers: dict[str, str]) -> str:
    """Drivers of one answer together; nothing where all apply the argument."""
    groups: dict[str, list[str]] = {}
    for driver, reported in answers.items():
        if reported != "applied":
            groups.setdefault(reported.replace(f"driver '{driver}' refuses ", ""), []).append(
                driver
            )
    return "; ".join(f"{', '.join(drivers)}: {reported}" for reported, drivers in groups.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

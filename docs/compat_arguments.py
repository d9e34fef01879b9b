"""Writes docs/compat-arguments.md: what each driver does with each argument of compat's Trainer.

    python docs/compat_arguments.py

Each argument is given a value that is not its default, on each driver in turn, as a user would.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drivetrain.compat import Seq2SeqTrainingArguments
from drivetrain.compat.arguments import backend
from drivetrain.compat.arguments.table import APPLIED_BY, SCRIPTS_ONLY
from drivetrain.kernel.registry import find_driver, known_backends

PAGE = Path(__file__).with_name("compat-arguments.md")

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
    "profile": "4.47",
    "checkpoint_format": "hf",
    "report_to": ["tensorboard"],
    "save_strategy": "no",
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
}
"""What an argument needs beside it."""


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


def rows() -> Iterator[tuple[dataclasses.Field[Any], dict[str, str]]]:
    """Each argument, and what each driver answers."""
    for item in dataclasses.fields(Seq2SeqTrainingArguments):
        yield item, {driver: answer(driver, item) for driver in shipped()}


def page() -> str:
    """The text of docs/compat-arguments.md."""
    lines = [
        "# Arguments of `drivetrain.compat`",
        "",
        "Generated by `python docs/compat_arguments.py`; a test holds it equal to what the code",
        "does. Each argument is applied on every driver unless a line says which refuse it, or",
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
    for driver, told in answers.items():
        if told != "applied":
            groups.setdefault(told.replace(f"driver '{driver}' refuses ", ""), []).append(driver)
    return "; ".join(f"{', '.join(drivers)}: {told}" for told, drivers in groups.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

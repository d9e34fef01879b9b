"""The model card: README.md of a trained model, with metadata that the Hub understands."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from ...checkpoint.storage.local import replace_text
from ..trainer.inspection import unwrap_peft
from ..trainer.parts import TrainerParts

__all__ = ["write_card"]

_log = logging.getLogger(__name__)

_BOOKKEEPING = ("epoch", "step", "total_flos", "runtime", "per_second", "preparation_time", "_mem_")
"""Ends, or parts, of the keys that an evaluation logs beside metrics."""

_ALWAYS_TOLD = (
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "optim",
    "lr_scheduler_type",
    "seed",
)
_NEVER_TOLD = ("dir", "token", "hub", "push", "report_to", "logging", "run_name", "disable_tqdm")
"""Parts of the names of arguments that say nothing of the model."""

_PACKAGES = ("drivetrain", "torch", "transformers", "peft", "datasets", "tokenizers")


def write_card(trainer: TrainerParts, **given: Any) -> str:
    """Write README.md into the output folder of `trainer`; `given` as `create_model_card` has it.

    Returns the library's name in its metadata.
    """
    try:
        from huggingface_hub import ModelCard
    except ImportError as error:
        raise ImportError("a model card is written by: pip install huggingface_hub") from error
    path = Path(trainer.args.output_dir, "README.md")
    before = ModelCard.load(path).data if path.exists() else None
    data = _metadata(trainer, before, given)
    replace_text(path, f"---\n{data.to_yaml()}\n---\n\n{_text(trainer, data, given)}")
    return str(data.library_name)


def _metadata(trainer: TrainerParts, before: Any, given: Mapping[str, Any]) -> Any:
    """huggingface_hub's ModelCardData of what is given and what is known."""
    from huggingface_hub import EvalResult, ModelCardData

    base = given["finetuned_from"] or _origin(trainer.model)
    tasks = given["tasks"] or _tasks_of(trainer.model)
    name = given["model_name"] or Path(trainer.args.output_dir).name or base
    known = getattr(before, "library_name", None)
    library = "transformers" if hasattr(trainer.model, "save_pretrained") else "pytorch"
    tags = [*given["tags"], *(getattr(before, "tags", None) or ()), "generated_from_trainer"]
    tags_of_data, arguments = _data_tags(trainer, given)
    results = [
        EvalResult(
            task_type=task,
            dataset_type=tag,
            dataset_name=(given["datasets"] or tags_of_data)[index],
            dataset_args={"args": arguments[index]} if index < len(arguments) else None,
            metric_type=metric.lower().replace(" ", "_"),
            metric_name=metric,
            metric_value=value,
        )
        for task in tasks
        for index, tag in enumerate(tags_of_data)
        for metric, value in _last_evaluation(trainer.state.log_history).items()
        if metric != "Loss"
    ]
    return ModelCardData(
        model_name=name,
        library_name="peft" if known == "peft" else library,
        language=given["language"],
        license=given["license"] or _license_of(base),
        base_model=base,
        tags=list(dict.fromkeys(tags)),
        pipeline_tag=tasks[0] if tasks else None,
        datasets=tags_of_data or None,
        eval_results=results or None,
    )


def _tasks_of(model: Any) -> list[str]:
    """The tasks of a model of transformers, by its class; none for any other."""
    if "transformers" not in sys.modules:
        return []
    from transformers import modelcard

    name = type(unwrap_peft(model)).__name__
    mapping: Any = modelcard.TASK_MAPPING
    found = [task for task, classes in mapping.items() if name in _names(classes)]
    return found[-1:]


def _names(classes: Mapping[str, str | tuple[str, ...]]) -> set[str]:
    return {name for v in classes.values() for name in ((v,) if isinstance(v, str) else v)}


def _origin(model: Any) -> str | None:
    """The name on the Hub that the model was loaded from, if it was not a folder."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return name if name and not Path(name).is_dir() else None


def _data_tags(trainer: TrainerParts, given: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """Names of the data sets, and their configurations; of a `datasets.Dataset` from the Hub its
    own.
    """
    data = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    builder = getattr(data, "builder_name", None)
    known = builder is not None and builder not in ("csv", "json", "pandas", "parquet", "text")
    tags = given["dataset_tags"] or ([builder] if known else [])
    return tags, given["dataset_args"] or ([data.config_name] if known else [])


def _license_of(base: str | None) -> str | None:
    """The licence of the model on the Hub that this one comes from, where it can be asked."""
    if base is None:
        return None
    import httpx
    from huggingface_hub import HfApi

    try:
        tags = HfApi().model_info(base, timeout=10).tags or []
    except (httpx.HTTPError, OSError, ValueError) as error:  # offline is an OSError
        _log.info("the licence of %s is not known: %s", base, error)
        return None
    return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)


def _text(trainer: TrainerParts, data: Any, given: Mapping[str, Any]) -> str:
    """The text below the metadata."""
    about = f"Trained on {', '.join(given['datasets'] or data.datasets or ['data without a name'])}"
    if data.base_model:
        about += f", beginning with `{data.base_model}`"
    history = trainer.state.log_history
    results = [f"- {name}: {_short(value)}" for name, value in _last_evaluation(history).items()]
    sections = [
        f"# {data.model_name}",
        f"{about}.",
        "## Evaluation\n\n" + ("\n".join(results) or "Not evaluated."),
        "## Intended use and limits\n\nTo be written.",
        "## Training data\n\nTo be written.",
        "## Arguments\n\n" + "\n".join(_told_arguments(trainer.args)),
    ]
    if rows := _evaluations(history):
        sections.append("## Course of training\n\n" + _table(rows))
    sections.append("## Versions\n\n" + "\n".join(_versions()))
    return "\n\n".join(sections) + "\n"


def _told_arguments(args: Any) -> list[str]:
    """The usual arguments, and those that are not at their defaults."""
    defaults = {item.name: item.default for item in fields(args)}
    told = [
        (name, value)
        for name, value in args.to_dict().items()
        if name in _ALWAYS_TOLD
        or (
            value not in (None, [], {}, "", defaults.get(name))
            and not any(part in name for part in _NEVER_TOLD)
        )
    ]
    return [f"- {name}: {v.value if isinstance(v, Enum) else v}" for name, v in told]


def _metrics(log: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation's log, by names to be read."""
    return {
        key.removeprefix("eval_").replace("_", " ").title(): value
        for key, value in log.items()
        if key.startswith("eval_") and not any(part in key for part in _BOOKKEEPING)
    }


def _last_evaluation(history: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    evaluations = [metrics for log in history if (metrics := _metrics(log))]
    return evaluations[-1] if evaluations else {}


def _evaluations(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each evaluation during training, with the last training loss before it."""
    rows, loss = [], "-"
    for log in history:
        loss = log.get("loss", loss)
        if metrics := _metrics(log):
            renamed = {"Validation Loss" if n == "Loss" else n: v for n, v in metrics.items()}
            place = {"Step": log.get("step"), "Epoch": log.get("epoch"), "Training Loss": loss}
            rows.append({**place, **renamed})
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    """In Markdown; a metric that an evaluation lacks is an empty cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_short(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _versions() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"- {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

"""Uploading what a run makes to the Hugging Face Hub, by huggingface_hub."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...trainer.run_lock import LOCK
from ..enums import HubStrategy, SaveStrategy
from ..names import PREFIX_CHECKPOINT_DIR, TRAINING_ARGS_NAME
from ..trainer.parts import TrainerParts
from .card import write_card

__all__ = ["HubMixin", "quiet_uploads"]

_log = logging.getLogger(__name__)

_NOT_UPLOADED = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*", "*.sagemaker-upload*", f"{LOCK}*"]
"""Patterns of what stays here when the output folder is uploaded; SageMaker leaves such marks."""

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model*.safetensors",
    TRAINING_ARGS_NAME,
)
"""Patterns of what makes up the model in a checkpoint's folder."""


@contextlib.contextmanager
def quiet_uploads() -> Iterator[None]:
    """No progress bars of huggingface_hub, which would break that of the training."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@dataclass
class _Push:
    """Uploads that are under way in the background."""

    jobs: list[Future[Any]] = field(default_factory=list)

    def is_done(self) -> bool:
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        """Wait for all, and say which failed: training does not end for it."""
        wait(self.jobs)
        for error in filter(None, (job.exception() for job in self.jobs)):
            _log.error("an upload to the Hub failed: %s", error)
        self.jobs = []


class HubMixin(TrainerParts):
    """The part of Trainer that uploads. `hub_model_id` is None until there is a repository."""

    hub_model_id: str | None = None
    push_in_progress: _Push | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository where there is none, on the first rank, and keep its full name.

        `token` and `private` stand in for `hub_token` and `hub_private_repo`.
        """
        if not self.is_world_process_zero():
            return
        made = _api().create_repo(
            self.args.hub_model_id or Path(self.args.output_dir).absolute().name,
            token=self.args.hub_token if token is None else token,
            private=self.args.hub_private_repo if private is None else private,
            exist_ok=True,
        )
        self.hub_model_id = made.repo_id

    init_git_repo = init_hf_repo

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, write its card and upload the output folder without checkpoints.

        Called by all ranks; the first uploads, after what is under way, and gets the commit
        (blocking) or a future of it. `kwargs` go to `create_model_card`.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        name = Path(self.args.hub_model_id or self.args.output_dir).name
        if model_tags := getattr(self.model, "model_tags", None):
            kwargs["tags"] = list(dict.fromkeys([*_listed(kwargs.get("tags")), *model_tags]))
        self.create_model_card(**{"model_name": name, **kwargs})
        self._finish_current_push()
        return self._upload(
            self.args.output_dir,
            commit_message,
            token=token,
            revision=revision or self.args.hub_revision,
            run_as_future=not blocking,
            ignore_patterns=_NOT_UPLOADED,
        )

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write README.md into the output folder, on the first rank: what is given, and what the
        run knows of its model, data, metrics and arguments. Tags of a card that is there are kept.
        Raises ImportError where transformers, which writes it, is missing.
        """
        if not self.is_world_process_zero():
            return
        is_peft = write_card(
            self,
            _listed(tags),
            language=language,
            license=license,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )
        if is_peft:  # which adds what it says about adapters
            model = self.accelerator.unwrap_model(self.model)
            model.create_or_update_model_card(self.args.output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload in the background what `hub_strategy` asks for after a save; left out while the
        last upload is under way, unless `hub_always_push`.
        """
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        push = self.push_in_progress = self.push_in_progress or _Push()
        if not push.is_done() and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._bring_model_out(Path(checkpoint_folder))
        message = f"Training in progress, epoch {int(self.state.epoch or 0)}"
        if self.args.save_strategy == SaveStrategy.STEPS:
            message = f"Training in progress, step {self.state.global_step}"
        where = {"token": self.args.hub_token, "revision": self.args.hub_revision}
        push.jobs.append(
            self._upload(
                self.args.output_dir,
                message,
                run_as_future=True,
                ignore_patterns=_NOT_UPLOADED,
                **where,
            )
        )
        names = {
            HubStrategy.CHECKPOINT: "last-checkpoint",
            HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name,
        }
        if strategy in names:
            push.jobs.append(
                self._upload(
                    checkpoint_folder,
                    f"{message}, checkpoint",
                    run_as_future=True,
                    path_in_repo=names[strategy],
                    **where,
                )
            )

    def _bring_model_out(self, checkpoint: Path) -> None:
        """Copy the model's files from a checkpoint into the output folder, where users look."""
        target = Path(self.args.output_dir)
        for file in (path for pattern in _MODEL_FILES for path in checkpoint.glob(pattern)):
            shutil.copy(file, target / file.name)
        if hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(target)

    def _finish_current_push(self) -> None:
        """Wait for what is being uploaded."""
        if self.push_in_progress is not None:
            if not self.push_in_progress.is_done():
                _log.info("waiting for the upload of the last checkpoint")
            self.push_in_progress.wait_until_done()

    def _upload(self, folder: str, commit_message: str | None, **options: Any) -> Any:
        return _api().upload_folder(
            repo_id=self.hub_model_id,
            folder_path=folder,
            commit_message=commit_message,
            **options,
        )


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ImportError("the Hub is reached by: pip install huggingface_hub") from error
    return HfApi()


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())

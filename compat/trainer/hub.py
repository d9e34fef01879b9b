"""Uploads of a run's results to the Hugging Face Hub, by huggingface_hub."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from ...trainer.run_lock import LOCK
from ..enums import HubStrategy, SaveStrategy
from ..integrations.card import write_card
from ..integrations.hub import Push, hub_api
from ..names import PREFIX_CHECKPOINT_DIR, TRAINING_ARGS_NAME
from ..parts import TrainerParts

__all__ = ["HubMixin"]

_log = logging.getLogger(__name__)

_NOT_UPLOADED = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*", "*.sagemaker-upload*", f"{LOCK}*"]
"""Patterns of files in the output folder that are not uploaded, such as SageMaker's marker
files."""

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model*.safetensors",
    TRAINING_ARGS_NAME,
)
"""Patterns of the model's files in a checkpoint's folder."""


class HubMixin(TrainerParts):
    """The part of Trainer that uploads. `hub_model_id` is None until there is a repository."""

    hub_model_id: str | None = None
    push_in_progress: Push | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, if it does not exist, on the first rank, and store its full name.

        `token` and `private` replace `hub_token` and `hub_private_repo`.
        """
        if not self.is_world_process_zero():
            return
        made = hub_api().create_repo(
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

        Called by all ranks. The first rank uploads, after the upload in progress, and gets the
        commit (blocking) or a future of it. `kwargs` are passed to `create_model_card`.
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
        """Write README.md into the output folder on the first rank, from the given values and the
        run's model, data, metrics and settings. The tags of an existing card are kept. Raises
        ImportError if transformers, which writes the card, is missing.
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
        if is_peft:  # PEFT adds its text about adapters
            model = self.accelerator.unwrap_model(self.model)
            model.create_or_update_model_card(self.args.output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """After a save, upload in the background by `hub_strategy`. Skipped while the last upload
        is in progress, unless `hub_always_push` is set.
        """
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        push = self.push_in_progress = self.push_in_progress or Push()
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
        """Copy the model's files from a checkpoint into the output folder, where users expect
        them."""
        target = Path(self.args.output_dir)
        for file in (path for pattern in _MODEL_FILES for path in checkpoint.glob(pattern)):
            shutil.copy(file, target / file.name)
        if hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(target)

    def _finish_current_push(self) -> None:
        """Wait for the upload in progress."""
        if self.push_in_progress is not None:
            if not self.push_in_progress.is_done():
                _log.info("waiting for the upload of the last checkpoint")
            self.push_in_progress.wait_until_done()

    def _upload(self, folder: str, commit_message: str | None, **options: Any) -> Any:
        return hub_api().upload_folder(
            repo_id=self.hub_model_id,
            folder_path=folder,
            commit_message=commit_message,
            **options,
        )


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())

"""Loads weights: to resume from, and of the best model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...checkpoint import MANIFEST, CheckpointReader
from ...checkpoint.extra_state import extra_state
from ...kernel.errors import CheckpointMismatch
from ..checkpoints.edited import edited_weights, full_names
from ..checkpoints.extra_files import as_stored, load_stored, without_extra_keys
from ..checkpoints.key_conversion import converted_weights, ignored_keys
from ..checkpoints.model_files import (
    adapters_in,
    compare_versions,
    first_adapter,
    frozen_names,
    has_weights,
    load_adapters,
    load_weights,
    loads_itself,
    read_weights,
    reshape_buffers,
    stored_weights,
)
from ..checkpoints.overlay_reader import OverlayReader
from ..checkpoints.rotation import problem_with
from ..checkpoints.shards import read_shards
from ..common.inspection import is_peft_model
from ..parts import TrainerParts

__all__ = ["WeightsMixin"]

_LOG = logging.getLogger(__name__)


class WeightsMixin(TrainerParts):
    """Loads weights of checkpoints into the model or a driver."""

    # --- weights ------------------------------------------------------------------------------

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load a checkpoint's weights into the Trainer's model, or another model. Raises ValueError
        if the folder is not a checkpoint.

        In `train`, the weights of a kernel checkpoint are loaded later by the driver, which reads
        only the part of each rank. Exceptions are models that change while loading, and a
        subclass's own loop.
        """
        folder = Path(resume_from_checkpoint)
        if problem := problem_with(folder):
            raise ValueError(f"Can't find a valid checkpoint at {folder}: {problem}")
        early = self._has_own("_inner_training_loop") or loads_itself(self.model)
        if (folder / MANIFEST).is_file() and model is None and self.is_in_train and not early:
            return
        _LOG.info("loading the model from %s", folder)
        compare_versions(folder)
        model = self.model if model is None else model
        if self.driver_session.is_partitioned(model):
            self.driver_session.engine.restore(self._weights_reader(folder))
        elif is_peft_model(model) and adapters_in(folder):
            load_adapters(model, folder)
        else:
            self._load_files(folder, model)

    def _load_files(self, folder: Path, model: nn.Module) -> None:
        """Load a folder's weights into a model that is whole on every rank."""
        weights = converted_weights(model, self._read_files(folder), model.state_dict().keys())
        result = load_weights(model, weights)
        known = load_stored(model, folder, self.args.device)
        result.missing_keys[:] = [name for name in result.missing_keys if name not in known]
        self._issue_warnings_after_load(result)

    def _read_files(self, folder: Path) -> dict[str, Tensor]:
        """Read weights from files, or from the shards that HF's FSDP and DeepSpeed write."""
        if has_weights(folder):
            return read_weights(folder)
        shards = read_shards(folder)
        weights = read_weights(folder) if shards is None else dict(shards.weights)
        if not is_peft_model(self.model):
            return weights
        known, adapter = self.model.state_dict().keys(), first_adapter(self.model)
        return {
            next((each for each in full_names(name, adapter) if each in known), name): tensor
            for name, tensor in weights.items()
        }

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raises `CheckpointMismatch`, naming the keys that the checkpoint lacks, and keys that the
        model does not have. Missing frozen weights are named in a warning.
        """
        missing, unexpected = [*load_result.missing_keys], [*load_result.unexpected_keys]
        without_extra_keys(self.model, missing, unexpected)
        ignored = getattr(self.model, "_keys_to_ignore_on_save", None)
        if missing and ignored and set(missing) == set(ignored):
            self.model.tie_weights()
            missing = []
        missing = _but_for(missing, ignored_keys(self.model, "missing"))
        unexpected = _but_for(unexpected, ignored_keys(self.model, "unexpected"))
        frozen = {n for n, each in self.model.named_parameters() if not each.requires_grad}
        if trained := [name for name in missing if name not in frozen] or unexpected:
            raise CheckpointMismatch(
                f"the checkpoint does not fit the model, of which {len(trained)} weights would "
                f"stay as they are or be left out: it lacks {_some(missing)}, and has "
                f"{_some(unexpected)}, which the model has not. Resume with the model that wrote "
                "it, or load what fits by from_pretrained or load_state_dict, and start over"
            )
        if missing:
            _LOG.warning(
                "There were missing keys in the checkpoint model loaded: %s; they are frozen, and "
                "stay as they are.",
                missing,
            )

    def _load_best_model(self) -> None:
        """Give the model the weights of the best checkpoint; the optimizer stays as it is."""
        assert self.state.best_model_checkpoint is not None
        folder = Path(self.state.best_model_checkpoint)
        _LOG.info("loading the best model from %s (%s)", folder, self.state.best_metric)
        if problem := problem_with(folder):
            _LOG.warning(
                "the best model could not be loaded, the last one stays: %s: %s. On several "
                "machines without a common file system, set save_on_each_node=True",
                folder,
                problem,
            )
        elif self.driver_session.is_partitioned(self.model):
            self.driver_session.engine.restore(self._weights_reader(folder))
        elif is_peft_model(self.model) and adapters_in(folder):
            self._load_best_adapter(folder)
        elif (folder / MANIFEST).is_file() and not has_weights(folder):  # deleted, to save room
            self.driver_session.engine.restore(self._weights_reader(folder))
        else:
            if (folder / MANIFEST).is_file():
                reshape_buffers(self.model, CheckpointReader(folder))
            self._load_files(folder, self.model)

    def _load_best_adapter(self, folder: Path) -> None:
        name = first_adapter(self.model)
        own = folder / name
        try:
            self.model.load_adapter(str(own if own in adapters_in(folder) else folder), name)
        except RuntimeError as error:
            config = self.model.peft_config[name]
            if not config.is_prompt_learning:
                raise
            raise RuntimeError(
                f"load_best_model_at_end cannot load {config.peft_type.value} adapters, which are "
                "prompts, into a model that has them: set it to False, and load the best one after "
                f"training by PeftModel.from_pretrained(base_model, {str(folder)!r})"
            ) from error

    def _weights_reader(self, folder: Path) -> OverlayReader:
        """Return a reader of a checkpoint's weights only; weights that it lacks keep their
        values."""
        if (folder / MANIFEST).is_file():
            stored = CheckpointReader(folder)
            return OverlayReader(stored, self._weights_beside(stored), kinds=("weights", "extra"))
        if adapters_in(folder):
            raise ValueError(
                f"{folder} holds adapters alone, and this driver holds parts of the model on each "
                "rank: leave save_only_model=False to load the best model at the end"
            )
        weights, extra = self._weights_from_files(folder)
        return OverlayReader(None, weights=weights, state=extra)

    def _weights_from_files(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights by FQN, and the extra state of modules as a checkpoint stores it, read
        from a folder without a manifest. Weights that its files lack keep their present values,
        with a warning.
        """
        now = self._weights_now()
        first = {name: group[0] for group in self.driver_session.engine.tied for name in group}
        names = {*now, *first, *extra_state(self.model)}
        weights = converted_weights(self.model, self._read_files(folder), names)
        weights = {first.get(name, name): tensor for name, tensor in weights.items()}
        given = extra_state(self.model).keys()
        lacked = (now.keys() | given) - weights.keys()
        result = _LoadResult(sorted(lacked), sorted(weights.keys() - now.keys() - given))
        self._issue_warnings_after_load(result)
        extra = as_stored(self.model, weights)
        return {**now, **{name: each for name, each in weights.items() if name in now}}, extra

    def _weights_beside(self, stored: CheckpointReader) -> dict[str, Tensor]:
        """Return the weights that replace a checkpoint's own: weights that the checkpoint lacks,
        from the model, and weights of edited files.
        """
        if self._has_own("_load_from_checkpoint"):
            return self._weights_now()
        absent = frozen_names(self.model).difference(stored.names("weights"))
        edited = edited_weights(stored, self.driver_session.session, self.model)
        return {**self._weights_now(absent), **edited}

    def _weights_now(self, names: frozenset[str] | None = None) -> dict[str, Tensor]:
        """Return the model's present weights, whole, by FQN; copies if ranks hold parts of them."""
        if names is not None and not names:
            return {}
        sharded, engine = self.driver_session.is_sharded(), self.driver_session.engine
        chosen = None if names is None else sorted(names)
        with engine.full_params(chosen) if sharded else nullcontext(self.model) as module:
            return {
                name: tensor.detach().cpu().clone() if sharded else tensor.detach()
                for name, tensor in stored_weights(module).items()
                if names is None or name in names
            }


class _LoadResult(NamedTuple):
    """The keys that torch's `load_state_dict` reports."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def _but_for(names: Iterable[str], patterns: list[str]) -> list[str]:
    return [name for name in names if not any(re.search(each, name) for each in patterns)]


def _some(names: list[str]) -> str:
    """Format the first names of a list."""
    shown = ", ".join(map(repr, names[:4])) or "nothing"
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"

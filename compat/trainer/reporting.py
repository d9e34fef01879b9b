"""Logs, metrics, and the counts of operations and tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.storage.local import replace_text
from ...data.small_files import read_json
from ..common.metrics import metrics_format, speed_metrics
from ..names import TRAINER_STATE_NAME
from ..parts import TrainerParts
from ..profile import profile_of

__all__ = ["ReportingMixin"]

_log = logging.getLogger(__name__)


class ReportingMixin(TrainerParts):
    """Logging and counting methods of Trainer."""

    _counted: tuple[Any, int | None] | None = None
    """A model, and its number of parameters outside embeddings; None if it counts operations
    itself."""

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the epoch (and, if requested, the tokens seen) to `logs`, store them in the history,
        and pass this dict to all callbacks.

        `start_time`: start of the training, by `time.time()`, for tokens per second. To log more,
        override this method and call `super().log(logs, start_time)`.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            seen = self.state.num_input_tokens_seen
            logs["num_input_tokens_seen"] = seen
            if start_time is not None:
                here = seen - self._initial_num_input_tokens_seen
                logs.update(speed_metrics("train", start_time, num_tokens=here))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    metrics_format = staticmethod(metrics_format)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics on the first rank, aligned and sorted."""
        if not self.is_world_process_zero():
            return
        shown = {name: str(value) for name, value in metrics_format(metrics).items()}
        names, values = (max(map(len, column), default=0) for column in (shown, shown.values()))
        print(f"***** {split} metrics *****")
        for name in sorted(shown):
            print(f"  {name:<{names}} = {shown[name]:>{values}}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write `<split>_results.json` on the first rank; `combined` also adds the metrics to
        `all_results.json`, which keeps those of other splits.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        _write_json(folder / f"{split}_results.json", metrics)
        if combined:
            every = folder / "all_results.json"
            before = read_json(every) if every.exists() else {}
            _write_json(every, {**before, **metrics})

    def save_state(self) -> None:
        """Write `trainer_state.json` into the output folder, on the first rank."""
        if self.is_world_process_zero():
            self.state.save_to_json(Path(self.args.output_dir) / TRAINER_STATE_NAME)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Return the operations of one forward and backward of a batch: six per token and parameter
        outside embeddings; 0 for a model that does not provide its number of parameters.

        See `Profile.model_counts_operations`.
        """
        if self._counted is None or self._counted[0] is not self.model:
            # cached, since it iterates over all parameters
            self._counted = self.model, self._num_counted_parameters()
        num_parameters = self._counted[1]
        if num_parameters is None:
            own = getattr(self.model, "floating_point_ops", None)
            return float(own(inputs)) if callable(own) else 0
        tokens = self._main_input(inputs) if num_parameters else None
        return 0 if tokens is None else int(6 * tokens.numel() * num_parameters)

    def _num_counted_parameters(self) -> int | None:
        if profile_of(self.args).model_counts_operations:
            return None
        count = getattr(self.model, "num_parameters", None)
        return 0 if count is None else int(count(exclude_embeddings=True))

    def store_flos(self) -> None:
        """Add the operations counted since the last call, on all ranks, to the state."""
        self.state.total_flos += self._over_ranks(self.current_flos)
        self.current_flos = 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count this batch's tokens over all ranks, by `include_num_input_tokens_seen`."""
        if self.args.include_num_input_tokens_seen == "no":
            return
        tokens = self._main_input(inputs)
        if tokens is None:
            held = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
            _warn_once(
                f"tokens are not counted: batches hold {held} and no {self._main_input_name()!r}; "
                "set the model's attribute main_input_name"
            )
            return
        count = tokens.numel()
        if self.args.include_num_input_tokens_seen == "non_padding":
            count = self._not_padding(inputs, tokens)
        self.state.num_input_tokens_seen += int(self._over_ranks(count))

    def _not_padding(self, inputs: Mapping[str, Any], tokens: Any) -> int:
        padding = getattr(self.processing_class, "pad_token_id", None)
        if "attention_mask" in inputs:
            return int(inputs["attention_mask"].sum())
        if padding is not None:
            return int((tokens != padding).sum())
        _warn_once(
            "Could not determine method to count non-padding tokens: there is neither an "
            "attention_mask nor a pad_token_id, and padding is counted too"
        )
        return int(tokens.numel())

    def _main_input(self, inputs: Any) -> Any:
        """Return a batch's tokens; None if it has none, such as a list of uncollated samples."""
        return inputs.get(self._main_input_name()) if isinstance(inputs, Mapping) else None

    def _main_input_name(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")

    def _over_ranks(self, value: float) -> float:
        """Return the sum over feeders. All ranks must call it."""
        world = self.driver_session.world
        if world.size == 1:
            return value
        total = float(self.driver_session.session.tally([value])()[0])
        return total * world.num_feeders / world.size


def _write_json(path: Path, metrics: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(metrics, indent=4, sort_keys=True))


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)

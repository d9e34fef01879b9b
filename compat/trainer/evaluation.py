"""Evaluation and prediction: HF Trainer's methods, over all ranks, in the order of the data.

The kernel's `predict` requires a wrapped model, and outputs with one row per sample. Here a model
may be unwrapped, each batch passes through methods that users override, and outputs may be
anything; so this is a loop of its own. Outputs are gathered batch by batch, kept on their devices,
and joined once.

Evaluation does not change the random numbers of training: the state of all generators is restored.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..arguments.backend import ranks_of_a_reader
from ..common.debugging import print_xla_metrics
from ..common.metrics import speed_metrics
from ..data.lengths import has_length
from ..data.rank_batches import RankStream
from ..data.sharding import batches_with_last, num_real_samples
from ..evaluation.nested import (
    EvalLoopContainer,
    denumpify_detensorize,
    find_batch_size,
    first_samples,
    nested_map,
    nested_numpify,
)
from ..evaluation.outputs import EvalLoopOutput, EvalPrediction, PredictionOutput
from .prediction_step import PredictionStepMixin
from .preparation import PreparationMixin
from .reporting import ReportingMixin

__all__ = ["EvaluationMixin"]

_LOG = logging.getLogger(__name__)
_PADDING = -100


class _Batch(NamedTuple):
    """The outputs of all ranks for one batch, in the order of the data; None for missing ones."""

    losses: Any
    predictions: Any
    label_ids: Any
    inputs: Any


class EvaluationMixin(PreparationMixin, PredictionStepMixin, ReportingMixin):
    """`evaluate`, `predict` and the methods that they call."""

    model_preparation_time: float
    """Seconds of model preparation, if the Trainer evaluated before it trained."""
    _preparation_to_leave_out = 0.0
    """Preparation time to leave out of the current evaluation's duration, in seconds."""

    # --- evaluate and predict -----------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return metrics on `eval_dataset`, or on the Trainer's own. Metrics are logged and passed
        to callbacks.

        Each data set of a dict is evaluated separately, with `<prefix>_<name>` as prefix. A string
        selects one of the Trainer's own. `ignore_keys`: outputs of the model to leave out.
        """
        given = eval_dataset is not None
        datasets = eval_dataset if given else self.eval_dataset
        if isinstance(datasets, dict):
            each: dict[str, float] = {}
            for name, dataset in datasets.items():
                each |= self.evaluate(
                    eval_dataset=dataset if given else name,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=f"{metric_key_prefix}_{name}",
                )
            return each
        self._memory_tracker.start()
        dataloader = self.get_eval_dataloader(eval_dataset)
        start_time = time.time()
        output = self.evaluation_loop(
            dataloader,
            description="Evaluation",
            # without metrics predictions are not used
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        metrics = self._with_speed(output, metric_key_prefix, start_time)
        self.log(metrics)
        print_xla_metrics(self.args, self.driver_session)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return predictions for each sample of a data set, and metrics if it has labels; nothing
        is logged.

        Rows of different width are filled up with -100 at their end.
        """
        self._memory_tracker.start()
        dataloader = self.get_test_dataloader(test_dataset)
        start_time = time.time()
        output = self.evaluation_loop(
            dataloader,
            description="Prediction",
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        metrics = self._with_speed(output, metric_key_prefix, start_time)
        self.control = self.callback_handler.on_predict(
            self.args, self.state, self.control, metrics
        )
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def _with_speed(
        self, output: EvalLoopOutput, prefix: str, start_time: float
    ) -> dict[str, float]:
        metrics, num_samples = output.metrics or {}, output.num_samples or 0
        start_time += self._preparation_to_leave_out
        self._preparation_to_leave_out = 0.0
        total_batch = (
            self.args.eval_batch_size * self.args.world_size // ranks_of_a_reader(self.args)
        )
        steps = math.ceil(num_samples / total_batch)
        metrics |= speed_metrics(prefix, start_time, num_samples=num_samples, num_steps=steps)
        return metrics

    # --- the loop -----------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Pass every batch of a loader through `prediction_step`. All ranks call it and get the
        same result.

        Under `batch_eval_metrics` each batch is passed to `compute_metrics` and released.
        """
        args = self.args
        if prediction_loss_only is None:
            prediction_loss_only = args.prediction_loss_only
        model = self._model_to_evaluate()
        self._announce_evaluation(dataloader, description)
        self.callback_handler.eval_dataloader = dataloader
        gather = self._gathering()
        by_batch = args.batch_eval_metrics
        collects_all = not by_batch or description == "Prediction"
        kept = _Batch(*(self._container() for _ in range(4)))
        metrics: dict[str, Any] = {}
        num_seen = 0
        with self._random_state_kept():
            for step, (inputs, is_last) in enumerate(batches_with_last(dataloader), 1):
                num_real = num_real_samples(dataloader, is_last)
                size = find_batch_size(inputs) or self._size_of_object(dataloader, is_last)
                batch = self._gathered_batch(
                    gather, model, inputs, size, num_real, prediction_loss_only, ignore_keys
                )
                num_seen += find_batch_size(batch) or find_batch_size(inputs) or 0
                for container, part in zip(kept, batch, strict=True):
                    if part is not None and (collects_all or part is batch.losses):
                        container.add(part)
                self.control = self.callback_handler.on_prediction_step(
                    args, self.state, self.control
                )
                if by_batch and self._can_measure(batch):
                    given = batch._replace(inputs=inputs)
                    metrics = self._compute_metrics(given, compute_result=is_last)
                elif args.eval_accumulation_steps and step % args.eval_accumulation_steps == 0:
                    for container in kept:
                        container.to_cpu_and_numpy()
        self.gather_function = self.accelerator.gather_for_metrics
        whole = _Batch(*(container.get_arrays() for container in kept))
        if not by_batch and self._can_measure(whole):
            metrics = self._compute_metrics(whole)
        return EvalLoopOutput(
            whole.predictions,
            whole.label_ids,
            self._finished_metrics(metrics, whole.losses, metric_key_prefix),
            self._num_samples(dataloader, num_seen),
        )

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The old name of `evaluation_loop`."""
        return self.evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )

    def _model_to_evaluate(self) -> nn.Module:
        """Return the module to call, in evaluation mode, on the device and in the dtype of the
        arguments."""
        args, start_time = self.args, time.time()
        is_first = self.driver_session.prepared is None and not hasattr(
            self, "model_preparation_time"
        )
        model: nn.Module = self._wrap_model(self.model, training=False)
        if is_first:
            self.model_preparation_time = round(time.time() - start_time, 4)
            self._preparation_to_leave_out = self.model_preparation_time
        if model is not self.model:
            self.model_wrapped = model
        if not self.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            dtype = torch.float16 if args.fp16_full_eval else torch.bfloat16
            model = model.to(dtype=dtype, device=args.device)
        for switched in (model, self.optimizer):
            if callable(to_evaluation := getattr(switched, "eval", None)):
                to_evaluation()
        return model

    def _announce_evaluation(self, dataloader: Any, description: str) -> None:
        known = has_length(dataloader)
        _LOG.info("***** Running %s *****", description)
        _LOG.info("  Num examples = %s", self.num_examples(dataloader) if known else "unknown")
        _LOG.info("  Batch size = %s", self.args.eval_batch_size)

    def _container(self) -> EvalLoopContainer:
        args = self.args
        return EvalLoopContainer(
            args.eval_do_concat_batches, _PADDING, lists_of_samples=args.eval_use_gather_object
        )

    def _gathering(self) -> Callable[[Any], Any]:
        """Return the function that gathers ranks' outputs: `gather_function`. Unless it was
        replaced, a single rank does not gather, and under `eval_use_gather_object` lists, which
        hold one item per sample, are gathered as one list of all ranks' items.
        """
        usual, chosen = self.accelerator.gather_for_metrics, self.gather_function
        if chosen != usual:
            return chosen
        if self.driver_session.world.size == 1:
            return _as_it_is
        if self.args.eval_use_gather_object:
            return partial(nested_map, _with_lists(usual), list_is_leaf=True)
        return usual

    @contextmanager
    def _random_state_kept(self) -> Iterator[None]:
        session = self.driver_session.session
        before = session.rng_state()
        try:
            yield
        finally:
            session.set_rng_state(before)

    def _size_of_object(self, dataloader: Any, is_last: bool) -> int:
        """Return the number of samples of a batch that is an object, by the lengths of data and
        batches. On several ranks the last batch is filled up, and trimmed when it is gathered."""
        usual = int(self.args.eval_batch_size)
        alone = is_last and self.driver_session.world.size == 1 and has_length(dataloader)
        return self.num_examples(dataloader) % usual or usual if alone else usual

    def _gathered_batch(
        self,
        gather: Callable[[Any], Any],
        model: nn.Module,
        inputs: Any,
        size: int,
        num_real: tuple[int, int] | None,
        loss_only: bool,
        ignore_keys: list[str] | None,
    ) -> _Batch:
        """Pass one batch of each rank through `prediction_step`, then pad, gather and trim. The
        loss is that of the real samples (see `num_real_samples`); None: of all.
        """
        real = inputs if num_real is None else first_samples(inputs, *num_real)
        loss, logits, labels = self.prediction_step(
            model, real if loss_only else inputs, loss_only, ignore_keys=ignore_keys
        )
        if num_real is not None and not loss_only and loss is not None:
            loss, _, _ = self.prediction_step(model, real, True, ignore_keys=ignore_keys)
        losses = shown = None
        if loss is not None:
            losses = gather(loss.expand(size))
        if "inputs" in self.args.include_for_metrics:
            name = getattr(self.model, "main_input_name", "input_ids")
            shown = gather(self._pad_across_processes(self._prepare_input(inputs[name])))
        labels = self._pad_across_processes(labels)
        if logits is not None:
            logits = self._pad_across_processes(logits)
            if self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            logits = gather(logits)
        if labels is not None:
            labels = gather(labels)
        return _Batch(losses, logits, labels, shown)

    # --- metrics --------------------------------------------------------------------------------

    def _can_measure(self, batch: _Batch) -> bool:
        return (
            self.compute_metrics is not None
            and batch.predictions is not None
            and batch.label_ids is not None
        )

    def _compute_metrics(self, batch: _Batch, **kwargs: bool) -> dict[str, Any]:
        assert self.compute_metrics is not None
        extras = self.args.include_for_metrics
        return self.compute_metrics(
            EvalPrediction(
                predictions=batch.predictions,
                label_ids=batch.label_ids,
                inputs=batch.inputs if "inputs" in extras else None,
                losses=batch.losses if "loss" in extras else None,
            ),
            **kwargs,
        )

    def _finished_metrics(
        self, metrics: dict[str, Any], losses: Any, prefix: str
    ) -> dict[str, float]:
        """Return Python numbers, with the mean loss, each under `<prefix>_<name>`."""
        metrics = denumpify_detensorize(metrics or {})
        if losses is not None:
            losses = np.concatenate(losses) if isinstance(losses, list) else losses
            finite = np.isfinite(losses)
            if self.args.logging_nan_inf_filter and finite.any():
                losses = losses[finite]
            metrics[f"{prefix}_loss"] = losses.mean().item()
        if hasattr(self, "model_preparation_time"):
            metrics[f"{prefix}_model_preparation_time"] = self.model_preparation_time
        begin = f"{prefix}_"
        whole = {name: value for name, value in metrics.items() if name.startswith(begin)}
        # a "loss" of compute_metrics takes precedence over the model's, as in HF
        return whole | {begin + name: value for name, value in metrics.items() if name not in whole}

    def _num_samples(self, dataloader: Any, num_seen: int) -> int:
        """Return the length of the data set, or the number of samples seen if it has no length."""
        dataset = getattr(dataloader, "dataset", None)
        dataset = dataset.dataset if isinstance(dataset, RankStream) else dataset
        if dataset is not None and has_length(dataset):
            return len(dataset) or num_seen
        known = self.num_examples(dataloader) if has_length(dataloader) else 0
        return int(known) or num_seen

    # --- old names ------------------------------------------------------------------------------

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Gather every rank's tensors along dimension 0; all other dimensions must agree."""
        return None if tensors is None else self.accelerator.gather(tensors)

    def _gather_and_numpify(self, tensors: Any, name: str | None = None) -> Any:
        """Gather as numpy arrays."""
        return nested_numpify(self._nested_gather(tensors, name))

    def _pad_across_processes(self, tensor: Any, pad_index: float = _PADDING) -> Any:
        """Pad dimension 1 of tensors to the largest of all ranks; see `_gathering` for lists that
        are not padded.
        """
        if tensor is None or self.driver_session.world.size == 1:
            return tensor
        pad = partial(self.accelerator.pad_across_processes, dim=1, pad_index=pad_index)
        if self.args.eval_use_gather_object:
            padded = lambda part: part if isinstance(part, list) else pad(part)  # noqa: E731
            return nested_map(padded, tensor, list_is_leaf=True)
        return pad(tensor)


def _as_it_is(outputs: Any) -> Any:
    return outputs


def _with_lists(gather: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda part: gather(part, use_gather_object=isinstance(part, list))

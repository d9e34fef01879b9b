"""The trainer's data: loaders, samplers, the columns that they keep, and how batches are placed.

The order of training samples is a function of `data_seed` (or `seed`) and the epoch. Ranks get
their shares of it as in accelerate (see `data/sharding.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from ...data.killed_workers import context_of
from ...data.mixture import Mix
from ...data.socket_paths import keep_socket_paths_short
from ..arguments.backend import ranks_of_a_reader
from ..common.inspection import accepted_columns
from ..common.overrides import is_overridden
from ..common.placement import move
from ..data.columns import RemoveColumnsCollator, is_arrow_dataset, without_unused_columns
from ..data.lengths import LengthsByEpoch, has_length, is_rebalancing, sample_lengths
from ..data.own_kinds import Draws, loadable
from ..data.rank_batches import RankStream
from ..data.workers import begin_signalled_worker, seed_worker
from ..errors import ArgumentError
from ..parts import TrainerParts
from ..theirs import theirs

__all__ = ["LoadingMixin", "order_seed"]

_log = logging.getLogger(__name__)

_BY_LENGTH = ("group_by_length", "batch_rebalance")


def order_seed(args: Any) -> int:
    """Return the seed of the order of samples: `data_seed`, or `seed` if that is None."""
    seed: int = args.seed if args.data_seed is None else args.data_seed
    return seed


class LoadingMixin(TrainerParts):
    """The loaders of a trainer. Subclasses may override every method."""

    _signature_columns: list[str] | None
    _eval_dataloaders: dict[str, DataLoader[Any]]

    # --- loaders ----------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader over this rank's share of `train_dataset`, with `_train_batch_size`
        samples per batch.

        Raises ValueError without a training set.
        """
        if self.train_dataset is None:
            raise ValueError("training needs a data set: give the trainer train_dataset=")
        return self._get_dataloader(
            self.train_dataset,
            "Training",
            self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader over this rank's share of an evaluation set.

        `eval_dataset`: a data set, the name of one in `self.eval_dataset`, or None for
        `self.eval_dataset` itself. With persistent workers the loader is cached under that name.
        Raises ValueError if there is nothing to evaluate on.
        """
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("evaluation needs a data set: give the trainer eval_dataset=")
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if self.args.dataloader_persistent_workers and name in getattr(
            self, "_eval_dataloaders", {}
        ):
            return self._eval_dataloaders[name]
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        elif isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return self._get_dataloader(
            eval_dataset,
            "Evaluation",
            self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=name,
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return a loader over this rank's share of `test_dataset`, read like an evaluation set."""
        return self._get_dataloader(
            test_dataset, "test", self.args.eval_batch_size, sampler_fn=self._get_eval_sampler
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Sampler[Any] | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """Return the loader of the methods above, as `accelerator.prepare` returns it.

        `dataloader_key`: with persistent workers, the name under which the loader is cached.
        """
        args = self.args
        collator = self.data_collator
        whole = dataset  # the length column may be one that the model does not take
        if is_arrow_dataset(dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description=description)
            dataset = self._loadable(dataset, is_training)
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "drop_last": args.dataloader_drop_last,
            "collate_fn": collator,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and _can_pin(args.device),
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
            "in_order": getattr(args, "dataloader_in_order", True),
        }
        if not isinstance(dataset, IterableDataset):
            options |= _sampling(sampler_fn(whole) if sampler_fn is not None else None)
            if is_training:
                options["worker_init_fn"] = partial(
                    seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
                )
        if args.dataloader_num_workers:
            keep_socket_paths_short()
        if args.enable_jit_checkpoint and args.dataloader_num_workers:
            begin = options.get("worker_init_fn")
            options["worker_init_fn"] = partial(begin_signalled_worker, begin)
            options["multiprocessing_context"] = context_of(options["multiprocessing_context"])
        if options.get("batch_sampler") is not None:
            del options["batch_size"], options["drop_last"]
        loader: DataLoader[Any] = self.accelerator.prepare(DataLoader(dataset, **options))
        if dataloader_key is not None and args.dataloader_persistent_workers:
            self._eval_dataloaders = {
                **getattr(self, "_eval_dataloaders", {}),
                dataloader_key: loader,
            }
        return loader

    def _loadable(self, dataset: Any, is_training: bool) -> Any:
        args = self.args
        return loadable(dataset, order_seed(args), args.dataloader_num_workers, is_training)

    def _refuse_unloadable(self) -> None:
        """Raises `ArgumentError`, when a Trainer is built, for data that its loaders cannot read.
        Loaders of a subclass are not checked.
        """
        if not is_overridden(type(self), "get_train_dataloader"):
            self._loadable(self.train_dataset, is_training=True)
            if isinstance(self.train_dataset, Mix):
                self._get_train_sampler()
        if not is_overridden(type(self), "get_eval_dataloader"):
            several = isinstance(self.eval_dataset, dict)
            for each in self.eval_dataset.values() if several else [self.eval_dataset]:
                self._loadable(each, is_training=False)

    # --- order ------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        """Return the sampler of training by `train_sampling_strategy`; None for a data set without
        a length."""
        args = self.args
        dataset = self.train_dataset if train_dataset is None else train_dataset
        strategy = _strategy(args)
        if dataset is None or not has_length(dataset):
            if dataset is not None and strategy in _BY_LENGTH:
                _log.warning(
                    "train_sampling_strategy=%r has no effect on a data set without a length:"
                    " samples come in its own order",
                    strategy,
                )
            return None
        if isinstance(dataset, Mix):
            if strategy != "random":
                raise ArgumentError(
                    f"train_sampling_strategy is {strategy!r}, and a Mix has an order of its own"
                )
            return Draws(dataset, order_seed(args))
        if strategy == "sequential":
            return SequentialSampler(dataset)
        if strategy == "group_by_length":
            num_samples = args.train_batch_size * args.gradient_accumulation_steps
            return LengthsByEpoch(num_samples, self._lengths(dataset), order_seed(args))
        if strategy == "batch_rebalance":
            shared, steps = ranks_of_a_reader(args), args.gradient_accumulation_steps
            ranks = max(1, args.world_size // shared)
            kind = theirs("trainer_pt_utils", "BatchRebalanceSampler")
            return kind(  # type: ignore[no-any-return]
                self._lengths(dataset),
                effective_batch_size=args.train_batch_size * steps * ranks,
                dp_size=ranks,
                grad_accum=steps,
                seed=order_seed(args),
                rank=args.process_index // shared if ranks > 1 else 0,
                drop_last=args.dataloader_drop_last,
            )
        return RandomSampler(dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[Any] | None:
        """Return the sampler of evaluation: the data set's own order, or by length as in training.

        None, for the data set's own order, with several ranks and without a length.
        """
        if eval_dataset is None or not has_length(eval_dataset):
            return None
        if _strategy(self.args) == "group_by_length":
            size, seed = self.args.eval_batch_size, order_seed(self.args)
            return LengthsByEpoch(size, self._lengths(eval_dataset), seed)
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def _lengths(self, dataset: Any) -> list[int]:
        names = getattr(self.processing_class, "model_input_names", None)
        column = self.args.length_column_name if is_arrow_dataset(dataset) else None
        return sample_lengths(dataset, column, names[0] if names else None)

    # --- columns ----------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """Fill `_signature_columns`, once, with the names that a sample may have."""
        if self._signature_columns is None:
            self._signature_columns = accepted_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a `datasets.Dataset` without the columns that the model does not take."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        return without_unused_columns(
            dataset, self._signature_columns or [], self._model_name(), description, _log
        )

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """Wrap the collator in one that drops the keys of dict samples that the model does not
        take."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return RemoveColumnsCollator(
            data_collator,
            self._signature_columns or [],
            logger=_log,
            model_name=self._model_name(),
            description=description,
        )

    def _model_name(self) -> str:
        return type(self.model).__name__

    # --- batches ----------------------------------------------------------------------------

    def _prepare_input(self, data: Any) -> Any:
        """Move a batch to the trainer's device, and keep its containers.

        Under DeepSpeed, floating tensors get the engine's dtype too.
        """
        dtype = _deepspeed_dtype(self.accelerator) if self.is_deepspeed_enabled else None
        return move(data, self.args.device, dtype)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the batch for the model. Raises ValueError for an empty batch."""
        inputs = self._prepare_input(inputs)
        if hasattr(inputs, "__len__") and len(inputs) == 0:
            raise ValueError(
                "the batch is empty, so the model cannot train on it. Its samples should have some"
                f" of the keys {', '.join(self._signature_columns or []) or 'that the model takes'}"
            )
        return inputs

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples that a loader reads, over all ranks; an estimate if
        unknown."""
        try:
            dataset = dataloader.dataset
            return len(dataset.dataset if isinstance(dataset, RankStream) else dataset)  # type: ignore[arg-type]
        except (AttributeError, TypeError):
            return len(dataloader) * int(self.args.per_device_train_batch_size)

    @staticmethod
    def num_tokens(train_dl: DataLoader[Any], max_steps: int | None = None) -> int:
        """Count the tokens in a loader's batches, or in `max_steps` times the first batch, if that
        is given.

        Iterates over the loader, and counts the elements of `input_ids`.
        """
        num_tokens = 0
        for batch in train_dl:
            size = int(batch["input_ids"].numel())
            if max_steps is not None:
                return size * max_steps
            num_tokens += size
        return num_tokens

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples in one update: batch size x accumulation x ranks with samples of their
        own."""
        ranks = args.world_size // ranks_of_a_reader(args)
        return int(self._train_batch_size * args.gradient_accumulation_steps * ranks)


def _strategy(args: Any) -> str:
    if getattr(args, "group_by_length", False):  # its name in older arguments
        return "group_by_length"
    return str(getattr(args, "train_sampling_strategy", "random"))


def _sampling(sampler: Any) -> dict[str, Any]:
    """Return the keyword of a DataLoader for this sampler."""
    if is_rebalancing(sampler):
        return {"batch_sampler": sampler}
    return {} if sampler is None else {"sampler": sampler}


def _deepspeed_dtype(accelerator: Any) -> torch.dtype | None:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.hf_ds_config.dtype()


def _can_pin(device: torch.device) -> bool:
    """Return False for a device whose host memory torch cannot lock: MPS, or a third party's."""
    if device.type in ("cpu", "cuda", "xpu"):
        return True
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        return False
    return True

"""The trainer's data: loaders, samplers, the columns that they keep, and how batches are placed.

The order of training samples is a function of `data_seed` (or `seed`) and the epoch; ranks get
their shares of it in accelerate's way (see `sharding`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from ...data.mixture import Mix
from ...data.parent import end_with_parent
from ..arguments.backend import ranks_of_a_reader
from ..errors import ArgumentError
from ..theirs import theirs
from ..trainer.inspection import accepted_columns
from ..trainer.overrides import is_overridden
from ..trainer.parts import TrainerParts
from ..trainer.placement import move
from ..trainer.seeding import set_seed
from .columns import RemoveColumnsCollator, is_arrow_dataset, without_unused_columns
from .lengths import LengthsByEpoch, is_rebalancing, sample_lengths
from .own_kinds import Draws, loadable
from .rank_batches import RankStream

__all__ = ["LoadingMixin", "has_length", "order_seed", "seed_worker"]

_log = logging.getLogger(__name__)

_BY_LENGTH = ("group_by_length", "batch_rebalance")


def has_length(dataset: Any) -> bool:
    """True if a data set has a length."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError):  # some that are not sized raise the latter
        return False


def order_seed(args: Any) -> int:
    """The seed of the order of samples: `data_seed`, or `seed` where that is None."""
    seed: int = args.seed if args.data_seed is None else args.data_seed
    return seed


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed Python, NumPy and torch in a loader's worker, differently on each worker and rank. It
    ends with the process that trains."""
    if get_worker_info() is not None:
        end_with_parent(f"data worker {worker_id}: the process that trains", os.getppid())
    set_seed((num_workers * rank + torch.initial_seed()) % 2**32)


class LoadingMixin(TrainerParts):
    """The loaders of a trainer. Every method may be overridden, and is called by name."""

    _signature_columns: list[str] | None
    _eval_dataloaders: dict[str, DataLoader[Any]]

    # --- loaders ----------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader over this rank's share of `train_dataset`, `_train_batch_size` samples a batch.

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
        """A loader over this rank's share of an evaluation set.

        `eval_dataset`: a data set, the name of one in `self.eval_dataset`, or None for
        `self.eval_dataset` itself. With persistent workers the loader is kept under that name and
        given again. Raises ValueError when there is nothing to evaluate on.
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
        """A loader over this rank's share of `test_dataset`, read as evaluation sets are."""
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
        """The loader behind all of the above, as `accelerator.prepare` gives it back.

        `dataloader_key`: with persistent workers, the name under which the loader is kept.
        """
        args = self.args
        collator = self.data_collator
        whole = dataset  # its lengths may lie in a column that the model does not take
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
            "pin_memory": args.dataloader_pin_memory,
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
        """Raises `ArgumentError`, when a Trainer is built, for data that its loaders cannot read;
        those of a subclass may.
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
        """The order of training, by `train_sampling_strategy`; None for a set without a length."""
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
        """The order of evaluation: the data set's own, or by length as in training.

        None, which is the data set's own order, for several ranks and without a length.
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
        """A `datasets.Dataset` without the columns that the model does not take."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        return without_unused_columns(
            dataset, self._signature_columns or [], self._model_name(), description, _log
        )

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """The collator, in one that drops what the model does not take of dict samples."""
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
        """The batch on the trainer's device, its containers kept.

        Under DeepSpeed, floating tensors get the engine's dtype too.
        """
        dtype = _deepspeed_dtype(self.accelerator) if self.is_deepspeed_enabled else None
        return move(data, self.args.device, dtype)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch as the model will get it. Raises ValueError for an empty one."""
        inputs = self._prepare_input(inputs)
        if len(inputs) == 0:
            raise ValueError(
                "the batch is empty, so the model cannot train on it. Its samples should have some"
                f" of the keys {', '.join(self._signature_columns or []) or 'that the model takes'}"
            )
        return inputs

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of samples that a loader reads, over all ranks; estimated where unknown."""
        try:
            dataset = dataloader.dataset
            return len(dataset.dataset if isinstance(dataset, RankStream) else dataset)  # type: ignore[arg-type]
        except (AttributeError, TypeError):
            return len(dataloader) * int(self.args.per_device_train_batch_size)

    @staticmethod
    def num_tokens(train_dl: DataLoader[Any], max_steps: int | None = None) -> int:
        """The tokens in a loader's batches, times `max_steps` of the first where that is given.

        Walks through the loader. Counts the elements of `input_ids`.
        """
        num_tokens = 0
        for batch in train_dl:
            size = int(batch["input_ids"].numel())
            if max_steps is not None:
                return size * max_steps
            num_tokens += size
        return num_tokens

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples in one update: batch size x accumulation x ranks with samples of their own."""
        ranks = args.world_size // ranks_of_a_reader(args)
        return int(self._train_batch_size * args.gradient_accumulation_steps * ranks)


def _strategy(args: Any) -> str:
    if getattr(args, "group_by_length", False):  # the name of it in older arguments
        return "group_by_length"
    return str(getattr(args, "train_sampling_strategy", "random"))


def _sampling(sampler: Any) -> dict[str, Any]:
    """The keyword by which a DataLoader takes this sampler."""
    if is_rebalancing(sampler):
        return {"batch_sampler": sampler}
    return {} if sampler is None else {"sampler": sampler}


def _deepspeed_dtype(accelerator: Any) -> torch.dtype | None:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.hf_ds_config.dtype()

"""Methods that set several arguments at once and return the instance."""

from __future__ import annotations

from typing import Any

from ..enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from ..errors import ArgumentError

__all__ = ["Setters"]


class Setters:
    """Each method sets the arguments of its group; those not given are reset to the method's
    defaults."""

    def _set(self, **values: Any) -> Any:
        for name, value in values.items():
            setattr(self, name, value)
        return self

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Any:
        """Set the basics of training, and `do_train`. `gradient_checkpointing` is an old name."""
        old, new = gradient_checkpointing, activation_checkpointing
        recompute = new if old is None else old
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=recompute,
            gradient_checkpointing=recompute,
        )

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Any:
        """Set the arguments of evaluation, and `do_eval` unless the strategy is no."""
        chosen = IntervalStrategy(strategy)
        _need_steps("evaluation", chosen, steps)
        return self._set(
            eval_strategy=chosen,
            do_eval=chosen != IntervalStrategy.NO,
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay or 0,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Any:
        """Set the arguments of prediction, and `do_predict`."""
        return self._set(
            do_predict=True,
            per_device_eval_batch_size=batch_size,
            prediction_loss_only=loss_only,
        )

    def set_save(
        self,
        strategy: str | SaveStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Any:
        """Set the arguments of checkpoints and of their number."""
        chosen = SaveStrategy(strategy)
        _need_steps("saving", chosen, steps)
        return self._set(
            save_strategy=chosen,
            save_steps=steps,
            save_total_limit=total_limit,
            save_on_each_node=on_each_node,
        )

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Any:
        """Set the arguments of logging."""
        chosen = IntervalStrategy(strategy)
        _need_steps("logging", chosen, steps)
        return self._set(
            logging_strategy=chosen,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Any:
        """Set the arguments of uploads, and `push_to_hub`."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=HubStrategy(strategy),
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Any:
        """Set the optimizer and its hyper-parameters."""
        return self._set(
            optim=OptimizerNames(name),
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
        warmup_ratio: float = 0,
    ) -> Any:
        """Set the learning rate schedule. `warmup_ratio` is of 4.47; `warmup_steps` overrides
        it."""
        return self._set(
            lr_scheduler_type=SchedulerType(name),
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            warmup_steps=warmup_steps or warmup_ratio,
        )

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Any:
        """Set the arguments of loaders; overwrites both batch sizes."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )


def _need_steps(what: str, strategy: object, steps: float) -> None:
    if strategy == "steps" and steps == 0:
        raise ArgumentError(f"{what} by steps needs a number of steps above 0; it is 0")

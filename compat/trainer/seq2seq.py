"""The Trainer whose predictions are generated tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation.outputs import PredictionOutput
from .trainer import Trainer

__all__ = ["Seq2SeqTrainer"]


class Seq2SeqTrainer(Trainer):
    """A Trainer that, with `predict_with_generate`, passes generated tokens to `compute_metrics`.

    `args.generation_config`: a GenerationConfig, its path or its id; it replaces the model's.
    """

    _gen_kwargs: dict[str, Any]

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            tokenizer=tokenizer,
        )
        if (chosen := getattr(self.args, "generation_config", None)) is not None:
            self.model.generation_config = self.load_generation_config(chosen)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """Load a GenerationConfig from an instance, a file, a folder, or an id. Raises ValueError
        for a config that transformers would warn about, since it could not be saved with the model.
        """
        from transformers import GenerationConfig

        if isinstance(gen_config_arg, GenerationConfig):
            config = deepcopy(gen_config_arg)
        elif (path := Path(gen_config_arg)).is_file():
            config = GenerationConfig.from_pretrained(path.parent, path.name)
        else:
            config = GenerationConfig.from_pretrained(gen_config_arg)
        try:
            config.validate(strict=True)
        except ValueError as error:
            raise ValueError(
                f"{error}\n\nThis is of generation_config. Fix these issues to train your model."
            ) from error
        return config

    # --- evaluate and predict -----------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate as `Trainer` does; `gen_kwargs` (`max_length`, `num_beams` ...) are passed to
        `generate`.
        """
        self._generate_with(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict as `Trainer` does; `gen_kwargs` (`max_length`, `num_beams` ...) are passed to
        `generate`.
        """
        self._generate_with(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def _generate_with(self, gen_kwargs: dict[str, Any]) -> None:
        """Fill in the lengths and beams of the arguments."""
        args, given = self.args, dict(gen_kwargs)
        if given.get("max_length") is None and given.get("max_new_tokens") is None:
            given["max_length"] = args.generation_max_length
        if given.get("num_beams") is None:
            given["num_beams"] = args.generation_num_beams
        self._gen_kwargs = _requested(given)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss of a forward, the generated tokens, and the labels. Tokens and labels are
        padded to the length of the model's generation config.
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        has_labels = "labels" in inputs
        inputs = self._prepare_inputs(inputs)
        given = gen_kwargs or getattr(self, "_gen_kwargs", {})
        tokens = self._generated(inputs, _requested(given))
        config = self._filling_config()
        loss = self._loss_beside(model, inputs) if has_labels else None
        if self.args.prediction_loss_only:
            return loss, None, None
        labels = self._filled_up(inputs["labels"], config) if has_labels else None
        return loss, self._filled_up(tokens, config), labels

    # --- the parts of a step ------------------------------------------------------------------

    def _generated(self, inputs: Any, gen_kwargs: dict[str, Any]) -> Tensor:
        given = dict(inputs)
        made = given.get("decoder_input_ids")
        labels = given.get("labels")
        if made is not None and labels is not None and made.shape == labels.shape:
            # made from the labels, but the model must generate from the start
            given = {
                name: value
                for name, value in given.items()
                if name not in ("decoder_input_ids", "decoder_attention_mask")
            }
        gen_kwargs.setdefault("synced_gpus", False)
        with self._whole_to_generate() as module:
            tokens: Tensor = module.generate(**given, **gen_kwargs)
        return tokens

    def _whole_to_generate(self) -> AbstractContextManager[Any]:
        """Gather the whole model, since ranks may generate for different numbers of steps."""
        if self.driver_session.is_partitioned(self.model):
            return self.driver_session.engine.full_params()
        return nullcontext(self.model)

    def _filling_config(self) -> Any:
        """Return the model's generation config with defaults, which sets the width of texts."""
        config = self.model.generation_config
        if config._from_model_config:
            config._from_model_config = False  # else each call would derive it from the model again
        config.update(**config._get_default_generation_params(), defaults_only=True)
        return config

    def _loss_beside(self, model: nn.Module, inputs: Any) -> Tensor:
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
            if self.label_smoother is not None:
                loss: Tensor = self.label_smoother(outputs, inputs["labels"])
            else:
                loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return loss.detach().mean()

    def _filled_up(self, tokens: Tensor, config: Any) -> Tensor:
        width, new = tokens.shape[-1], config.max_new_tokens
        if width < config.max_length:
            return self._pad_tensors_to_max_len(tokens, config.max_length)
        if new is not None and width < new + 1:
            return self._pad_tensors_to_max_len(tokens, new + 1)
        return tokens

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor:
        """Pad rows to `max_length` tokens with the padding token, or else the end token.

        Raises ValueError if neither the processing class nor the model has one.
        """
        source = self.processing_class
        padding = getattr(source, "pad_token_id", None)
        if padding is None:
            padding = getattr(source, "eos_token_id", None)
        if padding is None:
            padding = getattr(self.model.config, "pad_token_id", None)
        if padding is None:
            raise ValueError(
                "generated texts have to be filled up to one length, and there is no token for it: "
                "set model.config.pad_token_id, or give a processing_class that has pad_token_id"
            )
        filled = tensor.new_full((len(tensor), max_length), padding)
        filled[:, : tensor.shape[-1]] = tensor
        return filled


def _requested(gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Drop None values, for which the model's generation config applies."""
    return {name: value for name, value in gen_kwargs.items() if value is not None}

"""Batches that are objects, and outputs that contain an object."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from side_by_side import assert_same_weights, both, losses, ours, samples, sentences
from torch import Tensor, nn

from drivetrain.compat.common.placement import move


class Graph:
    """A graph as graph libraries have it: with named parts, and a method that moves it
    to a device.
    """

    def __init__(self, **parts: Tensor) -> None:
        vars(self).update(parts)

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __len__(self) -> int:
        return len(vars(self))

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        return type(self)(**{name: part.to(device) for name, part in vars(self).items()})


@dataclasses.dataclass
class Pair:
    """A batch without a length, names or `to`."""

    x: Tensor
    labels: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        logits = self.inner(batch.x)
        return {"loss": nn.functional.cross_entropy(logits, batch.labels), "logits": logits}


def collated(kind: Any) -> Any:
    return lambda rows: kind(
        **{name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}
    )


def given_whole(kind: Any) -> Any:
    """Return a Trainer that passes the batch to the model as it is."""

    class Whole(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **kwargs: Any) -> Any:
            return model(inputs)["loss"]

        def prediction_step(self, model: Any, inputs: Any, *given: Any, **kwargs: Any) -> Any:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                outputs = model(inputs)
            return outputs["loss"], outputs["logits"], inputs.labels

    return Whole


STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
ASKED: dict[str, Any] = {**STEPS, "remove_unused_columns": False}


def test_a_batch_that_is_an_object_is_trained_on_as_there(tmp_path: Path) -> None:
    trainers = []
    for side in both(tmp_path):
        own = dataclasses.replace(side, trainer_type=given_whole(side.trainer_type))
        trainers.append(own.trainer(Model, data_collator=collated(Graph), **ASKED))
        trainers[-1].train()
    assert losses(trainers[0]) == pytest.approx(losses(trainers[1]), rel=1e-6)
    assert_same_weights(trainers[0].model, trainers[1].model)


def test_one_without_length_and_names_is_trained_on_evaluated_and_resumed(tmp_path: Path) -> None:
    """Train on batches for which transformers' Trainer fails, since it needs a length and names."""
    side = ours(tmp_path)
    own = dataclasses.replace(side, trainer_type=given_whole(side.trainer_type))
    graphs = own.trainer(Model, data_collator=collated(Graph), **ASKED)
    graphs.train()
    pairs = own.trainer(Model, data_collator=collated(Pair), **ASKED)
    pairs.train()
    assert losses(pairs) == losses(graphs)
    rows = collated(Pair)(samples(11))
    with torch.no_grad():
        expected = float(pairs.model(rows)["loss"])
    assert pairs.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    again = own.trainer(Model, data_collator=collated(Pair), **ASKED)
    again.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
    assert losses(again) == losses(pairs)


def test_it_is_refused_by_name_where_parts_are_asked_for(tmp_path: Path) -> None:
    trainer = ours(tmp_path).trainer(Model, data_collator=collated(Pair), **ASKED)
    for call, method in ((trainer.train, "compute_loss"), (trainer.evaluate, "prediction_step")):
        with pytest.raises(TypeError, match=rf"the batch is a Pair.*or override {method} and call"):
            call()


def test_an_object_is_moved_by_its_own_way() -> None:
    moved = move({"graph": Graph(x=torch.ones(2)), "name": "a"}, torch.device("meta"))
    assert moved["graph"].x.is_meta and moved["name"] == "a"


def mamba() -> Any:
    torch.manual_seed(1)
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, use_cache=True))


def test_a_cache_among_the_outputs_is_left_out(tmp_path: Path) -> None:
    """Compare losses. transformers' Trainer computes the same, but ends with a TypeError in
    predictions.
    """
    trained = []
    for side in both(tmp_path):
        data = {"train_dataset": sentences(8), "eval_dataset": sentences(5)}
        trainer = side.trainer(mamba, max_steps=2, **data)
        trainer.train()
        trainer.model.config.use_cache = True
        trained.append(trainer)
    assert losses(trained[0]) == pytest.approx(losses(trained[1]), rel=1e-5)
    predicted = trained[0].predict(sentences(5))
    assert predicted.predictions.shape == (5, 8, 16)
    assert predicted.metrics["test_loss"] == pytest.approx(
        trained[1].evaluate(sentences(5))["eval_loss"], rel=1e-5
    )

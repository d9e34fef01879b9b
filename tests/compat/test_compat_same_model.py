"""Several runs on one model: cross-validation, and fine-tuning after a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from few_cases import only_quick
from side_by_side import QUIET, classifier, losses, samples
from subjects import subject
from torch import nn

from drivetrain import Recipe, compat
from drivetrain.conformance.bench import Bench

SUBJECTS = {
    "ddp": subject("ddp", 2),
    "fsdp": subject("fsdp", 2),
    "mesh": subject("mesh", 2, {"tensor": 1}),
    "zero-2": subject("deepspeed", 2, {"stage": 2}),
    "zero-3": subject("deepspeed", 2, {"stage": 3}),
}


def plain(model: nn.Module) -> dict[str, Any]:
    """Return the weights, if they are whole plain parameters of a plain module that can
    be trained.
    """
    assert type(model).__name__ == "Classifier"
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert not any(vars(parameter) for parameter in model.parameters())
    model(**samples(1)[0])["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def several(bench: Bench, *, folder: str) -> dict[str, Any]:
    """A job: train two Trainers on one model, and call `fit` twice."""
    options = {"construct": "whole"} if bench.options.get("stage") == 3 else {}
    how = {"backend": bench.backend, "backend_options": {**bench.options, **options}}
    args = {"per_device_train_batch_size": 4, "learning_rate": 0.05, "max_steps": 3}
    data = {"train_dataset": samples(22), "eval_dataset": samples(7)}

    def trainer(model: nn.Module) -> Any:
        given = compat.TrainingArguments(output_dir=folder, **{**QUIET, **args, **how})
        return compat.Trainer(model, given, **data)

    model = classifier()
    first = trainer(model)
    first.train()
    second = trainer(model)
    second.train()
    found: dict[str, Any] = {"losses": [*losses(first), *losses(second)]}
    found["evaluated"] = [each.evaluate()["eval_loss"] for each in (first, second)]
    first.train()  # its optimizer is of parameters that the model no longer has
    found["losses"] += losses(first)
    second.end()
    first.end()
    found["weights"] = plain(model)

    model = classifier()
    recipe = Recipe(lambda: model, lambda module, x: module(**x)["loss"] * len(x["x"]), samples(24))
    settings = {"steps": 3, "global_batch": 8, "data.shuffle": False}
    own = Bench(bench.backend, how["backend_options"])
    found["fitted"] = [own.fit(recipe, settings).loss for _ in range(2)]
    found["weights of fit"] = plain(model)
    return found


@pytest.mark.parametrize("driver", only_quick([n for n in SUBJECTS if n != "ddp"], ("fsdp",)))
def test_a_model_is_trained_again_and_given_back_whole(driver: str, tmp_path: Path) -> None:
    expected = SUBJECTS["ddp"].run(several, folder=str(tmp_path / "ddp"))[0]
    for found in SUBJECTS[driver].run(several, folder=str(tmp_path / driver)):
        for name in ("evaluated", "fitted"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
        assert found["losses"][:6] == pytest.approx(expected["losses"][:6], rel=1e-5)
        assert len(found["losses"]) == 9
        for name, weight in expected["weights of fit"].items():
            torch.testing.assert_close(found["weights of fit"][name], weight, rtol=1e-5, atol=1e-6)


def errors_of_a_failed_run(bench: Bench) -> list[str]:
    """A job: return the message about a model that another run has sharded and not yet
    given back.
    """
    model, reported = classifier(), []
    recipe = Recipe(lambda: model, lambda module, x: module(**x)["loss"], samples(8))

    def fail(event: object) -> None:
        if type(event).__name__ == "StepEnded":
            raise KeyError("an error of the user's")

    for observers in ([fail], []):
        try:
            bench.fit(recipe, {"steps": 2, "global_batch": 4}, observers=observers)
        except Exception as error:
            reported.append(str(error))
    return reported


def test_a_model_that_a_failed_run_has_sharded_is_refused_by_name() -> None:
    for reported in SUBJECTS["fsdp"].run(errors_of_a_failed_run, alone=True):
        assert "of which another run has partitioned 'all' over ranks" in reported[1]
        assert "load_state_dict" in reported[1]

"""One update: microbatches -> weighted loss -> update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from .contract import Batch, Engine, Outcome, Recipe, Session
from .errors import RecipeError

__all__ = ["StepResult", "Stepper"]


@dataclass(frozen=True)
class StepResult:
    """What one update left behind; tensors stay on the device."""

    loss: Tensor
    """0-d; its mean over feeders is the mean loss over the items of the global batch."""
    items: float
    """Items of the global batch."""
    requests: list[float]
    """For each number given as a request, its sum over ranks."""
    outcome: Outcome


class Stepper:
    """Runs updates so that the gradient is that of one full batch in one process (law 1).

    The items of the whole global batch are counted before the first backward, and each
    microbatch's sum of losses is divided by them, so ragged microbatches, accumulation and world
    size do not change the gradient.
    """

    def __init__(self, recipe: Recipe, engine: Engine, session: Session) -> None:
        self.engine = engine
        self.loss = recipe.loss
        self.session = session
        self.num_feeders = session.world.num_feeders

    def __call__(
        self,
        microbatches: Iterator[tuple[Batch, float]],
        num_microbatches: int,
        num_items: float,
        set_learning_rate: Callable[[], None],
        requests: Sequence[float] = (),
    ) -> StepResult:
        """One update over the next `num_microbatches` of `microbatches`.

        Each is a batch on the device and what it weighs: 1, less where its samples are repeated,
        0 when it only runs so that ranks stay together. `num_items`: this feeder's.
        `set_learning_rate` is called right before the update. `requests`: numbers to add up over
        ranks on the way.
        """
        engine, loss_function = self.engine, self.loss
        agreed = self.session.tally((num_items, *requests))
        scale = 0.0
        total: Tensor | None = None
        sums: list[float] = []
        for remaining in range(num_microbatches - 1, -1, -1):
            batch, share = next(microbatches)
            with engine.microbatch(last=not remaining):
                with engine.autocast():
                    loss = loss_function(engine.module, batch)
                if total is None:
                    check_loss(loss)
                    sums = agreed()  # waited for behind the first forward, and only then needed
                    scale = self.num_feeders / sums[0] if sums[0] else 0.0
                if loss.element_size() < 4:
                    loss = loss.float()  # the weight must not be rounded to bfloat16
                # a loss that is not finite makes every gradient NaN, so that no rank applies it:
                # the gradient of an overflowed loss may be finite
                weight = (loss.detach() * 0.0).add_(scale * share)
                loss = loss * weight
                engine.backward(loss)
            loss = loss.detach()
            total = loss if total is None else total + loss
        assert total is not None
        set_learning_rate()
        return StepResult(total, sums[0], sums[1:], engine.update())


def check_loss(loss: object) -> None:
    """Raises `RecipeError` unless `loss` is a scalar that a gradient flows from."""
    if not isinstance(loss, Tensor):
        raise RecipeError(
            f"recipe.loss returned {type(loss).__name__}; it must return a scalar tensor: the sum "
            "of the loss over the items of the batch"
        )
    if loss.dim() != 0:
        raise RecipeError(
            f"recipe.loss returned a tensor of shape {tuple(loss.shape)}; it must return a scalar: "
            "the sum of the loss over the items of the batch (use .sum() or reduction='sum')"
        )
    if not loss.requires_grad:
        raise RecipeError(
            "recipe.loss returned a tensor without a gradient; call the module that is passed in, "
            "and do not detach its output"
        )

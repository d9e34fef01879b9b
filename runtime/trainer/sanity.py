"""Checks before the first step for mistakes that would show only at the end: in evaluation, and in
losses that must be sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data.halves import Halves, halve
from ..data.indexed import is_indexed
from ..data.mixture import Mix
from ..data.open_dataset import Source, open_dataset
from ..data.prebatched import Batches
from ..data.stream import ReadAgain
from ..data.user_frames import last_line, raised_at
from ..kernel.batches import Group, Microbatch, Position
from ..kernel.contract import Engine, Session
from ..kernel.errors import CollectiveFailed, RecipeError, SettingError, ran_out
from ..kernel.recipe import Batch, Recipe
from .inference import prepared
from .own_gradients import evaluate
from .recipe_checks import deciding_metrics
from .settings import CheckpointSettings, Settings

__all__ = ["SanityCheck", "check_sanity_alone", "skipped_without_memory"]

_MOST_SAMPLES = 8
"""Largest number of samples of each reader in the batch that is checked."""
_LEFT_OUT = "; or set evaluate.sanity_check=false"

Samples = Callable[[bool], Generator[Group, None, None]]
"""Yields the group of samples to check: given True, in two microbatches; given False, in one."""


class SanityCheck:
    """Evaluates a few samples of each data set. All ranks call every method. Like any evaluation,
    it changes no state of training.

    `open_data`: `open_dataset` with the arguments that all data of the run share. `halves`: whether
    batches may be split in two, which gives a batch size that the run does not have. `resumed`:
    streams of training data may be set to a position, so they are not read. Samples of `Batches`
    are read once, and the batch itself is split.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        recipe: Recipe,
        settings: Settings,
        open_data: Callable[..., Source],
        micro_batch: int,
        halves: bool,
        resumed: bool = False,
    ) -> None:
        evaluates = settings.evaluate.every is not None or settings.evaluate.at_end
        self.recipe = recipe if evaluates else dataclasses.replace(recipe, eval_data={})
        self.session, self.engine, self.settings = session, engine, settings
        self.open_data = open_data
        self.samples = max(2, min(micro_batch, _MOST_SAMPLES) // 2 * 2) if halves else micro_batch
        self.halves, self.resumed = halves, resumed

    def check(self) -> None:
        """Raise `RecipeError` for a loss or a measure that fails or returns a mean. Raise
        `SettingError` for a metric that a setting names but no data set has."""
        names: set[str] = set()
        best = self.settings.checkpoint.best_metric
        named = {} if best == CheckpointSettings.best_metric else {"checkpoint.best_metric": best}
        named |= deciding_metrics(self.settings)
        for name, data in self.recipe.eval_data.items():
            measured = self._metrics(name, data)
            names |= {*measured, *(f"{name}.{metric}" for metric in measured)}
        for setting, metric in named.items() if names else ():
            if metric not in names:
                raise SettingError(
                    f"{setting} is {metric!r}, which no evaluation measures: there is "
                    f"{', '.join(sorted(names))}"
                )
        data = self.recipe.train_data
        if self.halves and self._can_be_read_twice(data) and self.recipe.step is None:
            self._check_loss(partial(self._read, data))

    @property
    def needs_first(self) -> bool:
        """True if `check_first` must check the loss, since the training data is read only once."""
        once = not (self.resumed or self._can_be_read_twice(self.recipe.train_data))
        return once and self.halves and self.recipe.step is None

    def check_first(self, part: Microbatch) -> None:
        """Check the loss on the first microbatch of the run, which is then trained on. Raise
        `RecipeError` as `check` does. Do nothing if the microbatch of a rank cannot be split."""
        if (split := self._split(part)) is not None:
            with self._tried("recipe.loss"):
                self._check_loss(lambda halved: _as_group(split.parts(halved)))

    def _check_loss(self, samples: Samples) -> None:
        recipe = dataclasses.replace(self.recipe, measure=self._loss, count_items=None)
        if self.recipe.loss_is == "mean":
            self._refuse_a_declared_sum(recipe, samples)
        else:
            self._refuse_a_mean(recipe, samples, self._sums(recipe, samples), "recipe.loss")

    def _can_be_read_twice(self, data: Any) -> bool:
        """True for data that can be indexed, and for streams that can be iterated over again. A
        loader may have generators of its own, which reading would advance, and an iterator loses
        the samples read."""
        while isinstance(data, ReadAgain):
            data = data.stream
        if isinstance(data, (Batches, DataLoader, Iterator, Mix)):
            return False
        return is_indexed(data) or not self.resumed

    def _loss(self, module: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the loss that the first step will compute. Other mistakes are left to that
        step."""
        loss: Any = self.recipe.loss(module, batch)
        return {"loss": loss} if isinstance(loss, Tensor) and not loss.dim() else {}

    def _metrics(self, name: str, data: Any) -> Mapping[str, float]:
        """Return the metrics of the first samples of a data set, which may be too few for some
        metrics.
        """
        origin = f"of eval_data[{name!r}], on its first samples"
        try:
            recipe = self.recipe
            if recipe.measure is None and recipe.loss_is == "sum":
                recipe = dataclasses.replace(recipe, measure=self._loss)
            samples = partial(self._read, data)
            whole = self._sums(recipe, samples)
            if self.recipe.measure is not None:
                with self._tried("recipe.measure") if _is_ready(data) else nullcontext():
                    self._refuse_a_mean(self.recipe, samples, whole, "recipe.measure")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if self.recipe.measure is None:
                raise  # an error of the loss itself, unchanged
            raise RecipeError(f"recipe.measure {origin}, {_raised(error)}") from error
        if self.recipe.summarise is None:
            return {key: float(value) for key, value in whole.items() if not value.dim()}
        try:
            return dict(self.recipe.summarise(whole))
        except Exception as error:
            number = int(whole["samples"])
            raise RecipeError(f"recipe.summarise {origin} ({number}), {_raised(error)}") from error

    def _sums(self, recipe: Recipe, samples: Samples, halved: bool = False) -> Mapping[str, Tensor]:
        """Return the sums over some samples, in one microbatch or two; if `halved`, each
        microbatch under its own name."""
        found: dict[str, Tensor] = {}
        number = count()
        measure = recipe.measure or self._loss

        def keep(sums: Mapping[str, Tensor]) -> Mapping[str, float]:
            found.update(sums)
            return {}

        def of_part(module: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
            part = next(number)
            return {f"{part}/{name}": value for name, value in measure(module, batch).items()}

        captured = dataclasses.replace(recipe, summarise=keep)
        if halved:
            captured = dataclasses.replace(captured, measure=of_part, count_items=None)
        evaluate(self.session, self.engine, captured, samples(halved))
        return found

    def _read(self, data: Any, halved: bool) -> Generator[Group, None, None]:
        """Yield the first samples of a data set as one group, in one microbatch or in two."""
        source = self.open_data(
            data,
            seed=0,
            global_batch=self.samples * self.session.world.num_readers,
            micro_batch=self.samples // 2 if halved else self.samples,
            num_epochs=1,
            workers=0,
        )
        groups = source.groups(Position(), 1)
        with closing(groups):
            for group in groups:
                if self.halves and _is_ready(data):
                    part = next(group.microbatches)
                    split = self._split(part)
                    yield from _as_group([part] if split is None else split.parts(halved))
                else:
                    yield group

    def _split(self, part: Microbatch) -> Halves | None:
        """Split the microbatch of each rank, or return None if that of a rank cannot be split."""
        split = halve(part)
        return split if all(self.session.exchange(split is not None)) else None

    @contextmanager
    def _tried(self, what: str) -> Iterator[None]:
        """Skip the rest of the block if a loss or measure fails there: a model may need batches of
        one size, and a loss may need gradients. Several ranks cannot know that another rank
        skipped, so there `RecipeError` is raised."""
        try:
            yield
        except (CollectiveFailed, RecipeError):
            raise
        except Exception as error:
            if self.session.world.size > 1:
                raise RecipeError(
                    f"{what}, tried without gradients on the first batch and on its halves, raised "
                    f"{type(error).__name__}: {error}. Mend it{_LEFT_OUT}"
                ) from error

    def _refuse_a_mean(
        self, recipe: Recipe, samples: Samples, whole: Mapping[str, Tensor], what: str
    ) -> None:
        """Raise `RecipeError` if the value of the whole is the mean of the values of its halves,
        and not their sum."""
        if not self.halves:
            return
        halves = self._sums(recipe, samples, halved=True)
        if _has_left_out(halves):
            return
        for name in whole.keys() - {"items", "samples"}:
            parts, once = _parts(halves, name), float(whole[name].sum())
            if len(parts) < 2 or not _is_mean(once, parts, exact=self.recipe.count_items is None):
                continue
            remedy = "use reduction='sum', or multiply by the number of items in the batch"
            if what == "recipe.loss":
                remedy += ", or declare Recipe(loss_is='mean') for a mean over the batch's items"
            raise RecipeError(
                f"{what} returns a mean for {name!r}, not a sum: of {int(whole['samples'])} "
                f"samples it is {once:.6g}, and of their halves {parts[0]:.6g} and {parts[1]:.6g}. "
                "The trainer adds up over microbatches and ranks, and divides by the number of "
                f"items: {remedy}{_LEFT_OUT}"
            )

    def _refuse_a_declared_sum(self, recipe: Recipe, samples: Samples) -> None:
        """Raise `RecipeError` if `loss_is` is "mean" but the loss returns a sum."""
        whole, halves = self._sums(recipe, samples), self._sums(recipe, samples, halved=True)
        parts = _parts(halves, "loss")
        if "loss" in whole and len(parts) == 2 and not _has_left_out(halves):
            once, total = float(whole["loss"].sum()), math.fsum(parts)
            if math.isclose(once, total, rel_tol=1e-4) and not _is_mean(once, parts, exact=False):
                raise RecipeError(
                    f"recipe.loss_is is 'mean', and recipe.loss returns a sum: of "
                    f"{int(whole['samples'])} samples it is {once:.6g}, and of their halves "
                    f"{parts[0]:.6g} and {parts[1]:.6g}. Leave loss_is out{_LEFT_OUT}"
                )


def check_sanity_alone(recipe: Recipe, settings: Settings, model: nn.Module) -> None:
    """Make the check without a run, in this process on the host, with an existing model of the
    recipe. Raises what the run would raise, unless the settings disable the check."""
    if not settings.evaluate.sanity_check:
        return
    of_model = dataclasses.replace(recipe, model=lambda: model)
    size = settings.micro_batch or settings.global_batch
    with prepared(of_model, Settings(seed=settings.seed), "cpu") as alone:
        open_data = partial(
            open_dataset,
            session=alone.session,
            collate=recipe.collate,
            count_items=recipe.count_items,
            fixed_size=False,
        )
        check = SanityCheck(
            alone.session, alone.engine, recipe, settings, open_data, size, halves=True
        )
        check.check()


def _raised(error: Exception) -> str:
    line = raised_at(error)
    where = f" ({line})" if line else ""
    return f"raised {last_line(error)}{where}. Mend it before the training starts{_LEFT_OUT}"


def _is_ready(data: Any) -> bool:
    return isinstance(data, Batches)


def _as_group(parts: Sequence[Microbatch]) -> Generator[Group, None, None]:
    number = sum(part.num_samples for part in parts)
    yield Group(Position(), Position(), number, len(parts), iter(parts))


def _parts(halves: Mapping[str, Tensor], name: str) -> list[float]:
    return [float(halves[key].sum()) for key in (f"0/{name}", f"1/{name}") if key in halves]


def _has_left_out(sums: Mapping[str, Tensor]) -> bool:
    """True if the collate function left samples out, so that halves have different numbers."""
    return bool(sums["items"] < sums["samples"])


def _is_mean(whole: float, halves: Sequence[float], exact: bool) -> bool:
    """True if `whole` is a mean of the halves, with equal weights if `exact`, and not their sum."""
    first, second = halves
    if math.isclose(whole, first + second, rel_tol=0.1):
        return False
    if exact:
        return math.isclose(whole, (first + second) / 2, rel_tol=1e-4)
    low, high = sorted((first, second))
    slack = 1e-4 * abs(whole)
    return low * high > 0 and low - slack <= whole <= high + slack


@contextmanager
def skipped_without_memory(num_ranks: int) -> Iterator[None]:
    """Skip the rest of the checks if memory runs out: the run itself handles that with smaller
    batches. Several ranks cannot know that another rank skipped, so there the error is raised."""
    try:
        yield
    except Exception as error:
        if num_ranks > 1 or not ran_out(error):
            raise

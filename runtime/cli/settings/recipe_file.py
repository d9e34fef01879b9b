"""Recipe files: plain Python that defines what to train.

::

    from drivetrain import Recipe, Settings

    def recipe(config: Config) -> Recipe: ...   # or `recipe()`, or `recipe = Recipe(...)`
    settings = Settings(steps=100)              # optional: the recipe's own defaults
    def sample(module) -> str: ...              # optional: a text to print at the end
    item_name = "tokens"                        # optional: what `count_items` counts
    observers = [...]                           # optional: called with each event of a run
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...data.user_frames import last_line
from ...kernel.errors import DrivetrainError, RecipeError, RecipeFailed, SettingError
from ...kernel.events import Observer
from ...kernel.recipe import Recipe
from ...trainer.recipe_checks import check_observers, check_recipe
from ...trainer.setting_values import override, parse
from ...trainer.settings import Settings

__all__ = [
    "DEFAULT_RECIPE",
    "TRANSFORMERS_RECIPE",
    "Incomplete",
    "RecipeFile",
    "load_recipe_file",
]

DEFAULT_RECIPE = Path(__file__).parents[1] / "gpt.py"
TRANSFORMERS_RECIPE = DEFAULT_RECIPE.with_name("hf.py")
"""The recipe of `hf:CONFIG.json`."""


@dataclass(frozen=True)
class Incomplete:
    """A configuration that still lacks values of fields without a default."""

    kind: type
    values: Mapping[str, Any]
    """The values that are given so far, by dotted key."""

    @property
    def missing(self) -> list[str]:
        """Names of the fields that still lack a value."""
        return [name for name in _required(self.kind) if name not in self.values]


@dataclass(frozen=True)
class RecipeFile:
    """A recipe file that was executed, and whose recipe is not built yet."""

    path: Path
    settings: Settings
    """The recipe's own defaults."""
    config: Any
    """The default configuration; `Incomplete` where fields have no default, None when the recipe
    takes no configuration."""
    item_name: str | None
    sample: Callable[[Any], str] | None
    predict: Callable[[Any, Any], Any] | None
    """`predict(module, batch)`, for `drivetrain predict`; None: `module(batch)`."""
    observers: Sequence[Observer]
    _recipe: Any

    def configure(self, config: Any, values: Mapping[str, Any]) -> Any:
        """Return a new configuration with those values; `Incomplete` while some are missing. Raises
        `SettingError`."""
        if values and self.config is None:
            raise SettingError(
                f"unknown setting recipe.{next(iter(values))}; {self.path.name} takes no "
                "configuration: give it `def recipe(config: Config)` with a dataclass Config"
            )
        if isinstance(config, Incomplete):
            return self._completed(Incomplete(config.kind, {**config.values, **values}))
        return override(config, values, prefix="recipe.") if values else config

    def _completed(self, config: Incomplete) -> Any:
        """Build the configuration once all required fields are given."""
        if config.missing:
            return config
        needed, hints = _required(config.kind), typing.get_type_hints(config.kind)
        given = {name: parse(f"recipe.{name}", config.values[name], hints[name]) for name in needed}
        name = config.kind.__name__
        made = _attempt(lambda: config.kind(**given), f"{name}(...) of {self.path} raised")
        rest = {key: value for key, value in config.values.items() if key not in needed}
        return override(made, rest, prefix="recipe.")

    def refuse_incomplete(self, config: Any) -> None:
        """Raises `SettingError`, naming the fields, where required fields lack a value."""
        if isinstance(config, Incomplete):
            keys = [f"recipe.{name}" for name in config.missing]
            raise SettingError(
                f"{', '.join(keys)} of {self.path} {'has' if len(keys) == 1 else 'have'} no "
                f"default: give {'it' if len(keys) == 1 else 'them'}, as by --set {keys[0]}=VALUE"
            )

    def build(self, config: Any) -> Recipe:
        """Build the recipe. Raises `RecipeFailed` with the traceback of the file's own error."""
        built = self._recipe
        if callable(built):
            with_config = () if self.config is None else (config,)
            built = _attempt(lambda: self._recipe(*with_config), f"recipe() of {self.path} raised")
        if not isinstance(built, Recipe):
            raise RecipeError(
                f"recipe of {self.path} is of type {type(built).__name__}; it must be a Recipe, or "
                "a function that returns one"
            )
        check_recipe(built)
        return built


def load_recipe_file(path: Path) -> RecipeFile:
    """Execute the file. Raises `RecipeError` where there is no file or no recipe in it, and
    `RecipeFailed` where it raised."""
    if not path.is_file():
        raise RecipeError(f"there is no recipe file {path}; give the path of a Python file")
    module = _attempt(lambda: _execute(path), f"{path} raised")
    recipe = getattr(module, "recipe", None)
    if recipe is None:
        raise RecipeError(
            f"{path} has no `recipe`; define `def recipe() -> Recipe` or `recipe = Recipe(...)`"
        )
    settings = getattr(module, "settings", Settings())
    if not isinstance(settings, Settings):
        raise RecipeError(
            f"settings of {path} is of type {type(settings).__name__}; it must be a "
            "drivetrain.trainer.settings.Settings"
        )
    item_name, sample = getattr(module, "item_name", None), getattr(module, "sample", None)
    if not isinstance(item_name, (str, type(None))):
        raise RecipeError(f"item_name of {path} is {item_name!r:.100}; it must be a text")
    if sample is not None and not callable(sample):
        raise RecipeError(f"sample of {path} is {sample!r:.100}; it must be a function")
    predict = getattr(module, "predict", None)
    if predict is not None and not callable(predict):
        raise RecipeError(f"predict of {path} is {predict!r:.100}; it must be a function")
    return RecipeFile(
        path=path,
        settings=settings,
        config=_default_config(path, module, recipe),
        item_name=item_name,
        sample=sample,
        predict=predict,
        observers=_observers(path, module),
        _recipe=recipe,
    )


def _observers(path: Path, module: ModuleType) -> Sequence[Observer]:
    observers = getattr(module, "observers", ())
    if not isinstance(observers, (list, tuple)):
        raise RecipeError(f"observers of {path} is {observers!r:.100}; it must be a list")
    check_observers(observers, f"observers of {path}")
    return observers


def _execute(path: Path) -> ModuleType:
    name = f"drivetrain_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickled data sets look it up there
    folder = str(path.resolve().parent)
    if path not in (DEFAULT_RECIPE, TRANSFORMERS_RECIPE) and folder not in sys.path:
        sys.path.insert(0, folder)  # like `python recipe.py`: it may import its neighbours
    spec.loader.exec_module(module)
    return module


def _default_config(path: Path, module: ModuleType, recipe: Any) -> Any:
    """Return an instance of the class that `recipe` takes; None when it takes nothing."""
    if isinstance(recipe, Recipe) or not callable(recipe):
        return None
    parameters = list(inspect.signature(recipe).parameters)
    if not parameters:
        return None
    hints = _attempt(lambda: typing.get_type_hints(recipe), f"the types of recipe in {path} raised")
    config_type = hints.get(parameters[0], getattr(module, "Config", None))
    if len(parameters) > 1 or not (isinstance(config_type, type) and is_dataclass(config_type)):
        raise RecipeError(
            f"recipe({', '.join(parameters)}) of {path} must take nothing, or one dataclass as in "
            "`def recipe(config: Config)`"
        )
    if _required(config_type):
        return Incomplete(config_type, {})
    return _attempt(config_type, f"{config_type.__name__}() of {path} raised")


def _required(kind: type) -> list[str]:
    """Return the names of a dataclass's fields without a default."""
    return [
        item.name
        for item in fields(kind)
        if item.init and item.default is MISSING and item.default_factory is MISSING
    ]


def _attempt(action: Callable[[], Any], what: str) -> Any:
    """Run `action`. An error in the user's file is raised as a `RecipeFailed` caused by it."""
    try:
        return action()
    except DrivetrainError:
        raise
    except Exception as error:
        raise RecipeFailed(f"{what} {last_line(error)}") from error

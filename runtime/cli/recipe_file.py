"""Recipe files: plain Python that says what to train.

::

    from drivetrain import Recipe, Settings

    def recipe(config: Config) -> Recipe: ...   # or `recipe()`, or `recipe = Recipe(...)`
    settings = Settings(steps=100)              # optional: the recipe's own defaults
    def sample(module) -> str: ...              # optional: a text to print at the end
    item_name = "tokens"                        # optional: what `count_items` counts
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..data.user_frames import last_line
from ..kernel.errors import DrivetrainError, RecipeError, RecipeFailed, SettingError
from ..kernel.recipe import Recipe
from ..trainer.recipe_checks import check_recipe
from ..trainer.setting_values import override
from ..trainer.settings import Settings

__all__ = ["DEFAULT_RECIPE", "RecipeFile", "load_recipe_file"]

DEFAULT_RECIPE = Path(__file__).with_name("gpt.py")


@dataclass(frozen=True)
class RecipeFile:
    """A recipe file that was run, and not yet asked for its recipe."""

    path: Path
    settings: Settings
    """The recipe's own defaults."""
    config: Any
    """The default configuration; None when the recipe takes none."""
    item_name: str | None
    sample: Callable[[Any], str] | None
    predict: Callable[[Any, Any], Any] | None
    """`predict(module, batch)`, for `drivetrain predict`; None: `module(batch)`."""
    _recipe: Any

    def configure(self, config: Any, values: Mapping[str, Any]) -> Any:
        """A configuration of its own with those values. Raises `SettingError`."""
        if values and self.config is None:
            raise SettingError(
                f"unknown setting recipe.{next(iter(values))}; {self.path.name} takes no "
                "configuration: give it `def recipe(config: Config)` with a dataclass Config"
            )
        return override(config, values, prefix="recipe.") if values else config

    def build(self, config: Any) -> Recipe:
        """The recipe. Raises `RecipeFailed` with the traceback of the file's own error."""
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
    """Run the file. Raises `RecipeError`: no such file, or it has no recipe; `RecipeFailed`: it
    raised."""
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
        _recipe=recipe,
    )


def _execute(path: Path) -> ModuleType:
    name = f"drivetrain_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickled data sets look it up there
    folder = str(path.resolve().parent)
    if path != DEFAULT_RECIPE and folder not in sys.path:
        sys.path.insert(0, folder)  # like `python recipe.py`: it may import its neighbours
    spec.loader.exec_module(module)
    return module


def _default_config(path: Path, module: ModuleType, recipe: Any) -> Any:
    """An instance of the class that `recipe` takes; None when it takes nothing."""
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
    return _attempt(config_type, f"{config_type.__name__}() of {path} raised")


def _attempt(action: Callable[[], Any], what: str) -> Any:
    """Errors of the user's file become a `RecipeFailed` that is caused by them."""
    try:
        return action()
    except DrivetrainError:
        raise
    except Exception as error:
        raise RecipeFailed(f"{what} {last_line(error)}") from error

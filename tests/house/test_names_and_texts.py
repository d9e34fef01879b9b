"""Public names are listed; there is no pickle and no address; docstrings begin with a verb or a
noun.
"""

from __future__ import annotations

import importlib
import types

import pytest
from house_rules import (
    PICKLE_ESCAPE,
    opening_breaches,
    pickle_breaches,
    sources,
    text_breaches,
    tracked_files,
)
from test_packaging import SETUPTOOLS

HOST = "https://" + ".".join(("pypi", "org")) + "/simple"
LOAD_UNSAFE = "torch.load(f, weights_" + "only=False)"


OF_TYPES = {"TYPE_CHECKING", "annotations"}
"""Names that a module imports for type checkers alone."""


@pytest.mark.parametrize("name", SETUPTOOLS["packages"])
def test_a_package_lists_its_public_names(name: str) -> None:
    """Require all public names, and no others. ruff sorts the lists; it checks those of modules."""
    package = importlib.import_module(name)
    if name == "drivetrain.compat":
        assert package.DataCollatorWithFlattening  # one of many that it hands on, and does not list
    listed = getattr(package, "__all__", [])
    assert len(set(listed)) == len(listed)
    for each in listed:
        assert hasattr(package, each), each
    public = {
        each
        for each, value in vars(package).items()
        if not each.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - OF_TYPES <= set(listed)


def test_nothing_pickles() -> None:
    found = [line for path, text in sources().items() for line in pickle_breaches(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import cloudpickle as c",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('dill')",
        "from torch import load",
        "from torch.serialization import load as read",
        "torch.serialization.load(f)",
        "engine.load_checkpoint(folder)",
        "pandas.read_pickle(f)",
        "numpy.load(f, allow_pickle=True)",
        "torch.load(f)",
        "torch.load(f, weights_only=flag)",
        LOAD_UNSAFE,
        LOAD_UNSAFE.replace("torch.load", "dcp.load"),
        f"import pickle  {PICKLE_ESCAPE}",
    ],
)
def test_a_pickle_is_seen(text: str) -> None:
    assert pickle_breaches("kernel/a.py", text)


def test_a_test_may_plant_a_pickle_openly() -> None:
    assert pickle_breaches("tests/kernel/test_a.py", "import pickle")
    assert not pickle_breaches("tests/kernel/test_a.py", f"import pickle  {PICKLE_ESCAPE}")
    assert not pickle_breaches("kernel/a.py", "torch.load(f, weights_only=True)")


def test_no_text_names_a_registry_or_a_machine() -> None:
    files = tracked_files()
    assert "pyproject.toml" in files
    found = [line for path, text in files.items() for line in text_breaches(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        HOST,
        "files." + "python" + "hosted.org/packages",
        "cd /" + "work/main",
        'open("/' + 'root/.cache")',
        "see /" + "home/someone/x",
    ],
)
def test_an_address_is_seen(text: str) -> None:
    assert text_breaches("README.md", text)


@pytest.mark.parametrize("text", ["the root/ of it", "home/work/x", "https://example.org/work/a"])
def test_an_innocent_text_passes(text: str) -> None:
    assert not text_breaches("README.md", text)


def test_a_docstring_says_what_the_thing_is_or_does() -> None:
    found = [line for path, text in sources().items() for line in opening_breaches(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        '"""Whether it runs."""',
        'def f():\n    """As it was."""',
        'class A:\n    """Likewise."""',
        'class A:\n    size: int\n    """Of the whole."""',
        'def f():\n    if f:\n        a = 1\n        """What is left."""',
    ],
)
def test_an_opening_that_finishes_the_name_is_seen(text: str) -> None:
    assert opening_breaches("kernel/a.py", text)


@pytest.mark.parametrize("text", ['"""Ask the rank."""', 'a = "Of all"', '"""Offer a port."""'])
def test_an_opening_with_a_verb_passes(text: str) -> None:
    assert not opening_breaches("kernel/a.py", text)

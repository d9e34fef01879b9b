"""Public names are listed and sorted; no pickle, no addresses, no paths of one machine."""

from __future__ import annotations

import importlib
import types

import pytest
from house_rules import (
    OF_TYPES,
    PICKLE_ESCAPE,
    ROOMS,
    pickle_breaches,
    public_name_breaches,
    room_of,
    sources,
    text_breaches,
    tracked_files,
)

HOST = "https://" + ".".join(("pypi", "org")) + "/simple"
LOAD_UNSAFE = "torch.load(f, weights_" + "only=False)"


def test_public_names_are_listed_and_sorted() -> None:
    library = {path: text for path, text in sources().items() if room_of(path)}
    assert library
    found = [line for path, text in library.items() for line in public_name_breaches(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_listed_names_can_be_imported(room: str) -> None:
    package = importlib.import_module(f"drivetrain.{room}".rstrip("."))
    listed = getattr(package, "__all__", [])
    for name in listed:
        assert hasattr(package, name), name
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name not in OF_TYPES
    }
    assert public <= set(listed)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kernel/a.py", "__all__ = ['b', 'a']\na = b = 1"),
        ("kernel/a.py", "__all__ = ['a', 'a']\na = 1"),
        ("kernel/a.py", "__all__ = ['a', 'B']\na = B = 1"),
        ("kernel/a.py", "__all__ = ['a']"),
        (
            "kernel/__init__.py",
            "_T = {'b': 'x', 'a': 'y'}\n__all__ = list(_T)\ndef __getattr__(n): ...",
        ),
        ("kernel/__init__.py", "from .loop import fit"),
        ("kernel/__init__.py", "from .loop import fit\n__all__ = []"),
        ("kernel/__init__.py", "import math\n__all__ = []"),
    ],
)
def test_a_bad_list_of_names_is_seen(path: str, text: str) -> None:
    assert public_name_breaches(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kernel/a.py", "import math\na = 1"),
        ("kernel/a.py", "__all__ = ['ONE', 'Two', 'three']\nONE = Two = three = 1"),
        ("kernel/__init__.py", "from .a import b as c, _d\n__all__ = ['c']"),
        ("kernel/__init__.py", "__all__ = ['Lazy']\ndef __getattr__(name): ..."),
        (
            "kernel/__init__.py",
            "_T = {'a': 'x', 'b': 'y'}\n__all__ = list(_T)\ndef __getattr__(n): ...",
        ),
    ],
)
def test_a_good_list_of_names_passes(path: str, text: str) -> None:
    assert not public_name_breaches(path, text)


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

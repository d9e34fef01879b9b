"""Checkers of the house rules: pure functions from source text to complaints.

Each takes the path of a file relative to the repository and its text, and returns one line for each
breach, `path:line: what`. The test files here test the checkers on bad snippets.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Room:
    """A folder that installs as a package, and the imports and words that its modules may have."""

    package: str
    folder: str
    siblings: frozenset[str] = frozenset()
    """Other packages of drivetrain that it may import: `kernel`, or only a module of one, such as
    `kernel.contract`.
    """
    outside: frozenset[str] | None = None
    """Top-level modules of other distributions that it may import; None allows all."""
    absolute: bool = False
    """True if it may say `drivetrain.x` instead of a relative import."""
    templates: frozenset[str] = frozenset()
    """Files that users copy, and which therefore import `drivetrain.x` absolutely."""
    secrets: frozenset[str] = frozenset()
    """Words that no string literal may hold; docstrings are exempt."""
    forbidden: frozenset[str] = frozenset()
    """Dotted names that it may neither import nor reach as an attribute."""
    vendors: dict[str, frozenset[str]] = field(default_factory=dict)
    """File or folder -> modules that it may import inside functions only."""
    late: frozenset[str] = frozenset()
    """Files that are only imported when needed, and so may import these modules at the top."""


DRIVER_NAMES = frozenset({"ddp", "fsdp", "deepspeed", "xla", "ipex"})
HARDWARE_NAMES = frozenset({"xpu", "nccl", "gloo", "cuda"})
NOT_THE_KERNELS = frozenset({"torch.distributed", "torch.cuda", "torch.xpu"})
NAMES_CUDA = "compat/cuda.py"
"""The one module of the library that may name `torch.cuda`; the others ask `torch.accelerator`."""
FRONT_DOOR = frozenset(
    {
        "Batches",
        "Mix",
        "Models",
        "Pack",
        "Parallel",
        "Recipe",
        "Settings",
        "TarShards",
        "TokenShards",
        "Turns",
        "__version__",
        "evaluate",
        "fit",
        "lora",
        "predict",
    }
)
SHARED_BY_DRIVERS = frozenset({"common", "process_group"})
BUILT_UPON = {"mesh": "fsdp"}
"""Drivers that extend another driver."""

_KERNEL = frozenset({"kernel"})
_CHECKPOINTED = _KERNEL | {"data", "checkpoint"}
_LAUNCHED = frozenset({"launched", "lost_ranks", "rank_launcher"})
_TRAINED = _CHECKPOINTED | _LAUNCHED | {"registry", "trainer"}

ROOMS = {
    "kernel": Room(
        "kernel",
        "kernel",
        outside=frozenset({"torch"}),
        secrets=DRIVER_NAMES | HARDWARE_NAMES,
        forbidden=NOT_THE_KERNELS,
    ),
    "backends": Room(
        "backends",
        "backends",
        siblings=frozenset(
            f"kernel.{module}" for module in ("contract", "errors", "plan", "recipe", "shards")
        )
        | _LAUNCHED
        | {"checkpoint.extra_state", "checkpoint.gc_paused", "checkpoint.optimizer_entries"}
        | {"data.fork_gc", "data.nested", "data.parallel", "data.random_state", "data.ranges"}
        | {"data.operations", "data.parent", "data.private_names", "data.repeated_blocks"}
        | {"data.small_files"},
        outside=frozenset({"torch"}),
        vendors={
            "backends/common/float8.py": frozenset({"torchao"}),
            "backends/deepspeed/": frozenset({"deepspeed"}),
            "backends/ipex.py": frozenset({"intel_extension_for_pytorch"}),
            "backends/xla/": frozenset({"torch_xla", "numpy"}),  # its meshes are numpy arrays
        },
    ),
    "data": Room(
        "data",
        "runtime/data",
        siblings=_KERNEL,
        outside=frozenset({"torch"}),
        secrets=DRIVER_NAMES | HARDWARE_NAMES,
        forbidden=NOT_THE_KERNELS,
        vendors={"runtime/data/small_files.py": frozenset({"yaml", "tomli"})},
    ),
    "checkpoint": Room(
        "checkpoint",
        "runtime/checkpoint",
        siblings=_KERNEL,
        outside=frozenset({"torch", "zlib_ng"}),
        secrets=DRIVER_NAMES | HARDWARE_NAMES,
        forbidden=NOT_THE_KERNELS,
        vendors={
            "runtime/checkpoint/format/safetensors.py": frozenset({"safetensors"}),
            "runtime/checkpoint/storage/": frozenset({"fsspec"}),
        },
        late=frozenset({"runtime/checkpoint/storage/fsspec_storage.py"}),
    ),
    "trainer": Room(
        "trainer",
        "runtime/trainer",
        siblings=_CHECKPOINTED | _LAUNCHED | {"registry"},
        outside=frozenset({"torch"}),
        secrets=DRIVER_NAMES | HARDWARE_NAMES,
        forbidden=NOT_THE_KERNELS,
    ),
    "run": Room("run", "runtime/run", siblings=_TRAINED | {"planning"}),
    "ranks": Room(
        "ranks", "runtime/ranks", siblings=_TRAINED | {"run"}, outside=frozenset({"torch"})
    ),
    "symbolic": Room(
        "symbolic",
        "runtime/symbolic",
        siblings=_TRAINED,
        outside=frozenset({"torch"}),
        secrets=DRIVER_NAMES | HARDWARE_NAMES,
    ),
    "planning": Room(
        "planning",
        "runtime/planning",
        siblings=_TRAINED | {"symbolic"},
        outside=frozenset({"torch"}),
        secrets=DRIVER_NAMES | HARDWARE_NAMES,
    ),
    "trackers": Room("trackers", "runtime/trackers", siblings=_TRAINED),
    "cli": Room(
        "cli",
        "runtime/cli",
        siblings=_TRAINED | {"conformance", "planning", "run", "symbolic", "trackers"},
        templates=frozenset({"runtime/cli/gpt.py", "runtime/cli/hf.py"}),
    ),
    "compat": Room("compat", "compat", siblings=_TRAINED | {"run"}),
    "conformance": Room(
        "conformance",
        "tests/conformance",
        siblings=_TRAINED | {"ranks", "symbolic"} | FRONT_DOOR,
        absolute=True,  # pytest may import these modules by the folder's name
        secrets=DRIVER_NAMES,
    ),
    "": Room(
        "",
        "runtime",
        siblings=_TRAINED | {"ranks"},
        outside=frozenset(),
        vendors={"runtime/rank_launcher.py": frozenset({"torch"})},
    ),
}
"""Rooms by the name of the installed package; the last is the front door, `drivetrain` itself."""


@dataclass(frozen=True)
class Import:
    """One imported name, resolved to a dotted path from the top."""

    name: str
    line: int
    relative: bool
    in_function: bool


def room_of(path: str) -> Room | None:
    """Return the room of a file, or None."""
    for room in ROOMS.values():
        if path.startswith(room.folder + "/"):
            return room
    return None


def module_name(path: str, room: Room) -> str:
    """Return a file's module: `runtime/checkpoint/store.py` is `drivetrain.checkpoint.store`."""
    inner = PurePosixPath(path).relative_to(room.folder).with_suffix("")
    return ".".join(filter(None, ("drivetrain", room.package, *inner.parts)))


def imports(path: str, tree: ast.Module, room: Room) -> Iterator[Import]:
    """Yield every import in a module. `from a import b` counts as `a.b`; an import by name counts,
    too.
    """
    parents = module_name(path, room).split(".")[:-1]  # __init__ is a part like any other
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        in_function = node in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, False, in_function)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                stem = parents[: len(parents) - node.level + 1]
                base = ".".join([*stem, base]).rstrip(".")
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, bool(node.level), in_function)
        elif isinstance(node, ast.Call) and node.args:
            called = dotted(node.func)
            first = node.args[0]
            if called in ("importlib.import_module", "import_module", "__import__") and (
                isinstance(first, ast.Constant) and isinstance(first.value, str)
            ):
                yield Import(_resolved(first.value, parents), node.lineno, False, in_function)


def _resolved(name: str, parents: list[str]) -> str:
    """Resolve a name as `import_module` does; with leading dots it is relative."""
    inner = name.lstrip(".")
    level = len(name) - len(inner)
    return ".".join([*parents[: len(parents) - level + 1], inner]) if level else name


def dotted(node: ast.expr) -> str:
    """Return `torch.cuda.device` for an attribute chain on a plain name, else an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def within(name: str, roots: Iterable[str]) -> bool:
    """Return True if a dotted name is one of `roots`, or below one."""
    return any(name == root or name.startswith(root + ".") for root in roots)


def import_breaches(path: str, text: str) -> list[str]:
    """List the names that a module of the library imports or reaches though its room may not."""
    room = room_of(path)
    if room is None:
        return []
    tree = ast.parse(text, path)
    found = []
    for item in imports(path, tree, room):
        if complaint := _judge(path, item, room):
            found.append(f"{path}:{item.line}: {complaint}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in _forbidden(path, room):
            found.append(f"{path}:{node.lineno}: {room.package} may not touch {dotted(node)}")
    return found


def _judge(path: str, item: Import, room: Room) -> str | None:
    top, _, rest = item.name.partition(".")
    if top == "drivetrain":
        if not (item.relative or room.absolute or path in room.templates):
            return f"import {item.name} relatively"
        if room.package and within(rest, [room.package]):
            return _judge_own(path, rest, room)
        if not within(rest, room.siblings):
            return f"{room.package} may not import drivetrain.{rest}"
        return None
    if top == "tests" or item.relative:
        return f"the library may not import {item.name}"
    if within(item.name, _forbidden(path, room)):
        return f"{room.package} may not import {item.name}"
    if top in sys.stdlib_module_names or room.outside is None or top in room.outside:
        return None
    vendors = [names for place, names in room.vendors.items() if path.startswith(place)]
    if any(top in names for names in vendors):
        fits = item.in_function or path in room.late
        return None if fits else f"import {top} inside the function that needs it"
    return f"{room.package} may not import {top}"


def _forbidden(path: str, room: Room) -> frozenset[str]:
    asks_cuda = path == NAMES_CUDA or path.startswith("tests/")
    return room.forbidden | (frozenset() if asks_cuda else {"torch.cuda"})


def _judge_own(path: str, rest: str, room: Room) -> str | None:
    """Return a complaint if a driver imports another, or a shared module imports a driver."""
    parts = rest.split(".")[1:]
    if room.package != "backends" or not parts or path.startswith(f"backends/{parts[0]}/"):
        return None
    known = {*SHARED_BY_DRIVERS, BUILT_UPON.get(path.split("/")[1])}
    if path.startswith("backends/common/") or parts[0] not in known:
        return f"{path} may not import {parts[0]} of the backends"
    return None


def secret_breaches(path: str, text: str) -> list[str]:
    """List string literals that name something that the room must not know. Docstrings
    are exempt.
    """
    room = room_of(path)
    if room is None or not room.secrets:
        return []
    tree = ast.parse(text, path)
    words = re.compile(rf"(?<![A-Za-z])({'|'.join(sorted(room.secrets))})(?![A-Za-z])", re.I)
    prose = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        f"{path}:{node.lineno}: {room.package} may not name {hit.group()!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose
        if (hit := words.search(node.value))
    ]


PICKLES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"})
LOADERS = frozenset({"torch.load", "torch.serialization.load"})
UNPICKLING = frozenset({"load_checkpoint", "read_pickle"})
"""Loaders that unpickle: a method of DeepSpeed's engine, which loads with weights_only=False, and
pandas' function.
"""
PICKLE_ESCAPE = "# house: pickle"
"""Comment for a line of a test that plants a pickle to see it refused."""


def pickle_breaches(path: str, text: str) -> list[str]:
    """List imports of pickle and its kin, and calls that would run what they read."""
    lines = text.splitlines()
    found = []

    def complain(node: ast.stmt | ast.expr, what: str) -> None:
        escaped = path.startswith("tests/") and PICKLE_ESCAPE in lines[node.lineno - 1]
        if not escaped:
            found.append(f"{path}:{node.lineno}: {what}")

    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(
            ("import_module", "import__")
        ):
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
        else:
            names = []
        for name in map(str, names):
            if name in LOADERS:
                complain(node, f"imports {name}: say torch.load, which this test looks at")
            if name.partition(".")[0] in PICKLES:
                complain(node, f"imports {name}")
        if isinstance(node, ast.Call):
            weights_only = [word.value for word in node.keywords if word.arg == "weights_only"]
            safe = [v for v in weights_only if isinstance(v, ast.Constant) and v.value is True]
            if weights_only and not safe:
                complain(node, "weights_only must be the literal True")
            elif dotted(node.func) in LOADERS and not safe:
                complain(node, f"{dotted(node.func)} without weights_only=True")
            elif isinstance(node.func, ast.Attribute) and node.func.attr in UNPICKLING:
                complain(node, f"{node.func.attr} unpickles")
            if any(word.arg == "allow_pickle" for word in node.keywords):
                complain(node, "allow_pickle")
    return found


def _joined(*parts: str) -> str:
    return re.escape(".".join(parts))


ADDRESSES = re.compile(
    "|".join(
        (
            _joined("pypi", "org"),
            "python" + "hosted",
            _joined("download", "pytorch", "org"),
            _joined("registry", "npmjs"),
            _joined("anaconda", "org"),
        )
    ),
    re.I,
)
MACHINE_PATHS = re.compile(r"(?<![\w.~/-])/(?:work|root|home|Users)(?=/|\b)(?:/[\w.-]*)*")


def text_breaches(path: str, text: str) -> list[str]:
    """List hosts of package registries and paths of one machine, in any text."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if ADDRESSES.search(line):
            found.append(f"{path}:{number}: names a package registry's host")
        if hit := MACHINE_PATHS.search(line):
            found.append(f"{path}:{number}: names a path of one machine, {hit.group()}")
    return found


OPENINGS = re.compile(r"(?:Of|What|That|Those|Which|Where|Whether|Likewise|As|Whose|Whom|Who)\b")
"""First words of docstrings that continue the sentence of the name instead of
describing the thing.
"""


def opening_breaches(path: str, text: str) -> list[str]:
    """List docstrings, of attributes too, that begin with one of `OPENINGS`."""
    return [
        f"{path}:{node.lineno}: docstring begins with {hit.group()!r}, not a verb or a noun"
        for node in docstrings(ast.parse(text))
        if (hit := OPENINGS.match(str(node.value).strip()))
    ]


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings that stand alone as statements: docstrings of all kinds."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())) if isinstance(node.value, ast.Constant):
                yield node.value


@cache
def tracked_files() -> dict[str, str]:
    """Return path and text of every text file in git, and of new files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    texts = {}
    for name in filter(None, done.stdout.split("\0")):
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
    return texts


def sources(prefix: str = "") -> dict[str, str]:
    """Return the Python files below a folder."""
    return {
        path: text
        for path, text in tracked_files().items()
        if path.startswith(prefix) and path.endswith(".py")
    }

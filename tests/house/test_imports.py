"""Imports between rooms. The table is ROOMS in house_rules.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from house_rules import ROOMS, import_breaches, secret_breaches, sources


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_may(room: str) -> None:
    folder = ROOMS[room].folder + "/"
    found = [line for path, text in sources(folder).items() for line in import_breaches(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", [name for name, room in ROOMS.items() if room.secrets])
def test_a_room_names_no_backend(room: str) -> None:
    folder = ROOMS[room].folder + "/"
    found = [line for path, text in sources(folder).items() for line in secret_breaches(path, text)]
    assert not found, "\n".join(found)


def test_training_by_the_drop_in_without_a_tracker_does_not_import_transformers() -> None:
    script = """
import sys, tempfile
import torch
from drivetrain.compat import Trainer, TrainingArguments

class Net(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).square().mean()}

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(output_dir=folder, max_steps=1, use_cpu=True, report_to="none")
    data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    assert Trainer(model=Net(2, 1), args=args, train_dataset=data).train().global_step == 1
others = {"transformers", "accelerate", "peft", "bitsandbytes"}
assert not others & set(sys.modules), others & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_listing_the_drivers_does_not_import_torch_s_compiler() -> None:
    """Require the compiler to be left out: its import takes as long as all the rest, and only
    training needs it.
    """
    script = """
import sys
from drivetrain.cli import main
sys.argv = ["drivetrain", "backends", "--json"]
try:
    main()
finally:
    compilers = {"torch._dynamo", "torch._inductor"} & set(sys.modules)
    assert not compilers, compilers
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert '"mesh"' in done.stdout and '"fsdp"' in done.stdout


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kernel/loop.py", "import numpy"),
        ("kernel/loop.py", "import torch.distributed as dist"),
        ("runtime/data/order.py", "import numpy"),
        ("kernel/loop.py", "from ..trainer.settings import Settings"),
        ("kernel/loop.py", "from ..checkpoint import CheckpointReader"),
        ("kernel/loop.py", "from .. import fit"),
        ("kernel/loop.py", "from ..registry import find_driver"),
        ("backends/ddp.py", "from ..registry import find_driver"),
        ("runtime/data/order.py", "from ..registry import find_driver"),
        ("runtime/data/order.py", "from ..checkpoint import CheckpointReader"),
        ("runtime/checkpoint/store.py", "from ..data.order import mix"),
        ("runtime/trainer/run.py", "from ..run.live import LiveProgress"),
        ("runtime/trainer/run.py", "import fsspec"),
        ("runtime/__init__.py", "import torch"),
        ("backends/common/stepping.py", "from ..process_group import session"),
        ("backends/ddp.py", "from .fsdp import sharding"),
        ("backends/ddp.py", "import torch\ntorch.cuda.set_device(0)"),
        ("compat/trainer/trainer.py", "from torch import cuda"),
        ("backends/fsdp/driver.py", "from ..deepspeed import zero_state"),
        ("backends/fsdp/driver.py", "from ...kernel.loop import TrainLoop"),
        ("runtime/trainer/fit.py", "from torch import distributed"),
        ("runtime/trainer/fit.py", "from torch.cuda import synchronize"),
        ("runtime/trainer/fit.py", "import torch\ntorch.cuda.synchronize()"),
        ("runtime/trainer/fit.py", "from drivetrain.kernel import contract"),
        ("runtime/trainer/fit.py", "from ..backends import cpu"),
        ("runtime/trainer/fit.py", "from .. import backends"),
        ("runtime/checkpoint/store.py", "from ...backends import cpu"),
        ("kernel/__init__.py", "from ..cli import main"),
        (
            "runtime/trainer/fit.py",
            "import importlib\nimportlib.import_module('drivetrain.backends.cpu')",
        ),
        ("backends/ddp.py", "from ..kernel.loop import fit"),
        ("backends/ddp.py", "from ..kernel import fit"),
        ("backends/ddp.py", "from .cpu import driver"),
        ("backends/ddp.py", "from . import cpu"),
        ("backends/ddp.py", "from ..compat import Trainer"),
        ("backends/ddp.py", "def f():\n    import deepspeed"),
        ("backends/deepspeed/driver.py", "import deepspeed"),
        ("backends/xla/driver.py", "class A:\n    import torch_xla"),
        ("compat/trainer/trainer.py", "from ...backends.cpu import driver"),
        ("compat/trainer/trainer.py", "from ...conformance import cases"),
        ("runtime/cli/__init__.py", "from ..compat import Trainer"),
        ("runtime/cli/__init__.py", "from ..backends import cpu"),
        ("runtime/cli/__init__.py", "import tests.house"),
        ("runtime/cli/__init__.py", "from drivetrain.kernel.contract import Recipe"),
        ("runtime/cli/gpt.py", "from drivetrain.backends.cpu import driver"),
        ("runtime/checkpoint/storage/fsspec_storage.py", "import s3fs"),
        ("runtime/checkpoint/storage/fsspec_storage.py", "from ....kernel.loop import TrainLoop"),
        ("runtime/checkpoint/storage/protocol.py", "from ...trainer.fit import fit"),
        ("tests/conformance/cases.py", "from ..backends import cpu"),
        ("tests/conformance/cases.py", "from drivetrain.cli import main"),
        ("tests/conformance/cases.py", "from drivetrain import cli"),
    ],
)
def test_a_bad_import_is_seen(path: str, line: str) -> None:
    assert import_breaches(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "runtime/trainer/fit.py",
            "import math, torch\nfrom torch import nn\nfrom ..kernel.contract import Session",
        ),
        (
            "runtime/checkpoint/store.py",
            "from ..kernel.shards import Piece\nfrom .manifest import A",
        ),
        ("kernel/step.py", "from .recipe import Recipe\nfrom . import loop"),
        ("backends/ddp.py", "import torch.distributed as dist\nfrom ..kernel.contract import Plan"),
        ("backends/ddp.py", "from .common import stepping\nfrom .process_group import session"),
        (
            "backends/fsdp/driver.py",
            "from . import dtensor\nfrom ..common.models import build_model",
        ),
        ("backends/deepspeed/driver.py", "def f():\n    from deepspeed.runtime import engine"),
        ("compat/trainer/trainer.py", "import transformers\nfrom ...kernel.loop import TrainLoop"),
        ("runtime/cli/gpt.py", "from drivetrain.kernel.contract import Recipe"),
        ("runtime/cli/app.py", "import typer\nfrom ..conformance import cases"),
        ("tests/conformance/cases.py", "from drivetrain import fit\nfrom .bench import A"),
        ("tests/kernel/test_loop.py", "import drivetrain.backends.cpu"),
    ],
)
def test_a_good_import_passes(path: str, line: str) -> None:
    assert not import_breaches(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("runtime/trainer/fit.py", "x = 'ddp'"),
        ("runtime/trainer/fit.py", "x = f'{1} needs NCCL'"),
        ("runtime/trainer/fit.py", "x = torch.device('cuda:0')"),
        ("runtime/trainer/fit.py", "x = {'torch_xla': 1}"),
        ("tests/conformance/cases.py", "if name == 'fsdp': pass"),
    ],
)
def test_a_backend_s_name_is_seen(path: str, line: str) -> None:
    assert secret_breaches(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("runtime/trainer/fit.py", "'''Not only for DDP.'''\nx = 1\n'''Nor for xla.'''"),
        ("runtime/trainer/fit.py", "x = torch.device('cpu')  # gloo"),
        ("runtime/trainer/fit.py", "x = 'barracuda, ddpx'"),
        ("runtime/registry.py", "x = {'ddp': 'ddp:driver'}"),
        ("backends/ddp.py", "x = 'ddp'"),
        ("tests/conformance/cases.py", "x = 'cuda'"),
    ],
)
def test_an_innocent_string_passes(path: str, line: str) -> None:
    assert not secret_breaches(path, line)


def test_the_kernel_loads_torch_and_the_standard_library_alone() -> None:
    script = """
import json, sys
import torch
before = set(sys.modules)
import importlib, pkgutil
import drivetrain.kernel
for module in pkgutil.iter_modules(drivetrain.kernel.__path__):
    importlib.import_module(f"drivetrain.kernel.{module.name}")
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    allowed = sys.stdlib_module_names | {"drivetrain", "torch"}
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "drivetrain.kernel" in loaded
    assert [name for name in loaded if name.partition(".")[0] not in allowed] == []
    ours = [name for name in loaded if name.startswith("drivetrain.")]
    assert [name for name in ours if not name.startswith("drivetrain.kernel")] == []

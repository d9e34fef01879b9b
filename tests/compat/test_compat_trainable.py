"""Models that cannot be trained, or not on this device, are refused when the Trainer is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from side_by_side import arguments, classifier, samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from drivetrain import compat
from drivetrain.kernel.errors import CapabilityRefused


def quantized(trainable: bool = False, aware: bool = False, **marks: Any) -> Any:
    """Return a model with the attributes of a quantized one."""
    model: Any = classifier()
    model.is_quantized = True
    model.hf_quantizer = SimpleNamespace(
        is_trainable=trainable,
        is_qat_trainable=aware,
        quantization_config=SimpleNamespace(quant_method="rounding"),
    )
    for name, value in marks.items():
        setattr(model, name, value)
    return model


@pytest.mark.row("W4")
@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({"trainable": True, "_orig_mod": nn.Identity()}, r"compile"),
        ({"trainable": True}, r"adapters"),
        ({"aware": True}, r"rounding"),
        ({"trainable": True, "aware": True}, None),
        ({"_hf_peft_config_loaded": True}, None),
    ],
    ids=["compiled", "no adapters", "not trainable", "aware", "with adapters"],
)
def test_quantized_models(
    tmp_path: Path, library: Any, marks: dict[str, Any], words: str | None
) -> None:
    args = arguments(library, tmp_path)
    if words is None:
        library.Trainer(quantized(**marks), args)
        return
    with pytest.raises(ValueError, match=words):
        library.Trainer(quantized(**marks), args)


@pytest.mark.row(
    "X16", status="refused", note="packed weights cannot be sharded; use backend='ddp'"
)
def test_a_quantized_model_is_not_sharded(tmp_path: Path) -> None:
    args = arguments(compat, tmp_path, backend="fsdp")
    with pytest.raises(CapabilityRefused, match=r"'fsdp' refuses a quantized .* backend='ddp'"):
        compat.Trainer(quantized(_hf_peft_config_loaded=True), args)


@pytest.mark.row(
    "X25",
    status="refused",
    note="a model that DistributedConfig has partitioned: a driver partitions whole ones",
)
def test_a_model_that_was_partitioned_elsewhere(tmp_path: Path, ranks_of_one: None) -> None:
    model, mesh = classifier(), init_device_mesh("cpu", (1,))
    model.outer.weight = nn.Parameter(distribute_tensor(model.outer.weight.detach(), mesh))
    with pytest.raises(CapabilityRefused, match=r"without tp_plan .*{'expert': 2}"):
        compat.Trainer(model, arguments(compat, tmp_path))


@pytest.fixture
def ranks_of_one() -> Any:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.row(
    "W10", status="differs", note="one process trains on one device; torchrun starts one for each"
)
def test_one_process_trains_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(compat, tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="torchrun --nproc-per-node=2"):
        compat.Trainer(classifier(), args)
    args._n_gpu = 1
    compat.Trainer(classifier(), args)
    assert "GPUs" not in caplog.text
    visible = arguments(compat, tmp_path, use_cpu=False, backend="ddp")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    card = SimpleNamespace(name="card", total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert [note for note in compat.arguments.backend.notes(visible, "ddp") if "4 GPUs" in note]


@pytest.mark.row("X15")
def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    args = arguments(compat, tmp_path, backend="fsdp", max_steps=2)
    for given in ((optimizer, None), (None, schedule)):
        with pytest.raises(RuntimeError, match="optimizer_cls_and_kwargs"):
            compat.Trainer(model, args, train_dataset=samples(), optimizers=given)
    keywords = {"lr": 0.1}
    trainer: Any = compat.Trainer(
        model,
        args,
        train_dataset=samples(),
        optimizer_cls_and_kwargs=(torch.optim.SGD, keywords),
    )
    trainer.train()
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(parameter) for parameter in trainer.model.parameters()}
    assert not held & {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    trainer.end()

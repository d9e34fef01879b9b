"""The cpu driver keeps the laws."""

import pytest
import torch

from drivetrain.backends.common import stepping
from drivetrain.conformance import Case, cases


@pytest.mark.parametrize("case", cases("cpu", peers=["cpu", "ddp:2"]), ids=str)
def test_laws(case: Case) -> None:
    case.check()


def test_the_norm_of_gradients_in_16_bits_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(1000, generator=generator).to(dtype) for dtype in (torch.bfloat16,) * 3]
    grads += [torch.randn(7, generator=generator), torch.randn(7, generator=generator).double()]
    expected = torch.cat([grad.double() for grad in grads]).norm()
    torch.testing.assert_close(stepping.global_norm(grads).double(), expected, rtol=1e-6, atol=0)


class Marked(torch.Tensor):
    """A loss class of the user's own."""


@pytest.mark.parametrize("kind", [torch.Tensor, Marked])
@pytest.mark.parametrize("has_short_way", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_backward_adds_the_weighted_gradient(
    kind: type[torch.Tensor],
    has_short_way: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_short_way:  # in a torch to come
        monkeypatch.setattr(stepping, "_run_backward", None)
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=dtype))
    for _ in "12":
        loss = weight.square().sum().as_subclass(kind)
        stepping.backward(loss, torch.tensor(0.25, dtype=dtype))
    torch.testing.assert_close(weight.grad, weight.detach(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="does not require grad"):
        stepping.backward(torch.ones(()), torch.ones(()))

"""The cpu driver keeps the laws."""

import pytest
import torch

from drivetrain.backends.common.stepping import global_norm
from drivetrain.conformance import Case, cases


@pytest.mark.parametrize("case", cases("cpu", peers=["cpu", "ddp:2"]), ids=str)
def test_laws(case: Case) -> None:
    case.check()


def test_the_norm_of_gradients_in_16_bits_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(1000, generator=generator).to(dtype) for dtype in (torch.bfloat16,) * 3]
    grads += [torch.randn(7, generator=generator), torch.randn(7, generator=generator).double()]
    expected = torch.cat([grad.double() for grad in grads]).norm()
    torch.testing.assert_close(global_norm(grads).double(), expected, rtol=1e-6, atol=0)

"""What tests of norms are run with."""

import pytest
import torch

LOW = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
KINDS = {
    "weight and bias": (True, True),
    "weight": (True, False),
    "bias": (False, True),
    "none": (False, False),
}
KIND = pytest.mark.parametrize("kind", KINDS)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

"""Graphs of ten nodes, and what stands in them, for tests of sparse tensors."""

import pytest
import torch

LAYOUTS = pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
X = torch.randn(10, 8, generator=torch.Generator().manual_seed(4))


def near(seed: int = 3, size: int = 10) -> torch.Tensor:
    """Weights of the edges between the nodes; most are zero."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.rand(size, size, generator=numbers) * (torch.rand(size, size, generator=numbers) > 0.6)

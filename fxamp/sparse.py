"""Sparse tensors: which those are."""

import torch

_LAYOUTS = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor stores some of its numbers alone, and where they stand."""
    return tensor.layout in _LAYOUTS

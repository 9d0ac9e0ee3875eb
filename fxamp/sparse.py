"""Sparse tensors: which those are, and others of their kind without their numbers."""

from typing import Any

import torch

_LAYOUTS = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
# Their rows are compressed; of the others the columns are.
_BY_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor stores some of its numbers alone, and where they stand."""
    return tensor.layout in _LAYOUTS


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a graph is for, of its inputs: dtype and number of dimensions, and of a sparse tensor its layout."""
    if tensor.layout is torch.strided:
        return tensor.dtype, tensor.dim()
    dense = tensor.dense_dim() if is_sparse(tensor) else None
    return tensor.dtype, tensor.dim(), tensor.layout, dense


def without_numbers(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of another's sizes, dtype and layout; a sparse one for as many numbers, which nobody may ask for."""
    if not is_sparse(tensor):
        return torch.empty_like(tensor, device=device)
    coo = tensor.layout == torch.sparse_coo
    values = torch.empty_like(tensor._values() if coo else tensor.values(), device=device)
    if coo:
        places = torch.zeros_like(tensor._indices(), device=device)
        is_coalesced = tensor.is_coalesced()
        return torch.sparse_coo_tensor(places, values, tensor.shape, is_coalesced=is_coalesced, check_invariants=False)
    by_rows = tensor.layout in _BY_ROWS
    ends = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    places = tensor.col_indices() if by_rows else tensor.row_indices()
    ends, places = (torch.zeros_like(part, device=device) for part in (ends, places))
    return torch.sparse_compressed_tensor(
        ends, places, values, tensor.shape, layout=tensor.layout, check_invariants=False
    )

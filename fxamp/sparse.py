"""Sparse tensors: which those are, what they store, and others of their kind without their numbers."""

import functools
from collections.abc import Callable
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


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that one is made of: of a sparse one those of the places, and last that of the numbers."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if not is_sparse(tensor):
        return (tensor.values() if tensor.layout == torch.jagged else tensor,)
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def held(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a tensor holds: of a sparse one, such as an embedding's gradient, those that it stores."""
    tensor = tensor.detach()
    return parts_of(tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor)[-1]


def hold_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same dtype hold the same numbers, in the same places."""
    if one.layout != other.layout or one.shape != other.shape:
        return False
    return all(map(torch.equal, parts_of(one.detach()), parts_of(other.detach())))


def side_by_side(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What two sparse tensors hold in each place that one of them stores, 0 where it stores nothing."""
    one, other = (each.detach().to_sparse(layout=torch.sparse_coo).coalesce() for each in (one, other))
    places = torch.cat([one.indices(), other.indices()], 1)
    ours, theirs = one.values(), other.values()
    first, second = torch.cat([ours, torch.zeros_like(theirs)]), torch.cat([torch.zeros_like(ours), theirs])
    first, second = (
        torch.sparse_coo_tensor(places, values, one.shape, device=one.device, check_invariants=False)
        .coalesce()
        .values()
        for values in (first, second)
    )
    return first, second


def without_numbers(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of another's sizes, dtype and layout; a sparse one for as many numbers, which nobody may ask for."""
    if not is_sparse(tensor):
        return torch.empty_like(tensor, device=device)
    *places, values = parts_of(tensor)
    places = [torch.zeros_like(part, device=device) for part in places]
    values = torch.empty_like(values, device=device)
    make: Callable[..., torch.Tensor] = functools.partial(torch.sparse_compressed_tensor, layout=tensor.layout)
    if tensor.layout == torch.sparse_coo:
        make = functools.partial(torch.sparse_coo_tensor, is_coalesced=tensor.is_coalesced())
    return make(*places, values, size=tensor.shape, device=device, check_invariants=False)

"""What torch's fake tensors do not know of sparse ones.

A fake sparse tensor holds no number at all, whatever the real one holds: how many those are, only the data tells.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fxamp.sparse import is_sparse

# Parts of a sparse tensor, as long as it holds numbers.
_PARTS = frozenset("values _values indices _indices col_indices row_indices".split())
# What its numbers decide on.
_NUMBERS = frozenset({"_nnz", "is_coalesced"})
_BLOCKED = frozenset({torch.sparse_bsr, torch.sparse_bsc})
_ENDS = {"compressed_indices", "crow_indices", "ccol_indices"}
_PLACES = {"plain_indices", "col_indices", "row_indices"}
_COMPRESSED: dict[Any, Any] = {
    torch.sparse_csr_tensor: torch.sparse_csr,
    torch.sparse_csc_tensor: torch.sparse_csc,
    torch.sparse_bsr_tensor: torch.sparse_bsr,
    torch.sparse_bsc_tensor: torch.sparse_bsc,
}


def asks_a_sparse_one(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether a method asks a sparse tensor for what its numbers decide on."""
    is_asked = isinstance(target, str) and (target in _PARTS or target in _NUMBERS)
    return is_asked and isinstance(args[0], torch.Tensor) and is_sparse(args[0])


def part_of_sparse(target: str, tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A part of a sparse fake, in a mode of open sizes with one that is.

    Raises:
        DataDependentOutputException, DynamicOutputShapeException: the data decides, and the mode has no open sizes.
    """
    if target in _NUMBERS:
        raise DataDependentOutputException(torch.ops.aten._nnz.default)
    if mode.shape_env is None:
        raise DynamicOutputShapeException(torch.ops.aten._values.default)
    with mode:
        part: torch.Tensor = getattr(tensor, target)()
        sizes = [*part.shape]
        sizes[_counts_at(target, tensor)] = mode.shape_env.create_unbacked_symint()
        return part.new_empty(sizes).requires_grad_(part.requires_grad)


def _counts_at(target: str, tensor: torch.Tensor) -> int:
    """The dimension of a part that is as long as the tensor holds numbers."""
    if tensor.layout == torch.sparse_coo:
        return 1 if target.endswith("indices") else 0
    return tensor.dim() - tensor.dense_dim() - 2


def makes_compressed(target: Any) -> bool:
    """Whether a function makes a sparse tensor of compressed rows or columns, which on fakes raises an error."""
    return target in _COMPRESSED or target is torch.sparse_compressed_tensor


def like_compressed(target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What such a function gives for fakes: numbers of the values' dtype and device, and with their gradient.

    Raises:
        DynamicOutputShapeException: the places of the numbers decide on its sizes.
    """
    ends, values, size, options = _taken_apart(*args, **kwargs)
    if size is None:
        raise DynamicOutputShapeException(torch.ops.aten.sparse_compressed_tensor.comp_plain_value)
    layout = _COMPRESSED[target] if target in _COMPRESSED else options["layout"]
    dense = values.sum().to(options.get("dtype") or values.dtype).expand(size)
    made = _laid_out(dense, layout, values, values.dim() - ends.dim() - 2 * (layout in _BLOCKED))
    return made.detach().requires_grad_() if options.get("requires_grad") else made


def _taken_apart(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The ends of rows or columns, the numbers, the sizes, and the options of such a call."""
    names = _ENDS, _PLACES, {"values"}, {"size"}
    rest = [kwargs.pop(name, None) for given in names[len(args) :] for name in given & kwargs.keys() or {""}]
    ends, _, values, size = (*args, *rest)
    return ends, values, size, kwargs


def like_sparse(tensor: torch.Tensor, sizes: Any) -> torch.Tensor:
    """One of other sizes, or in another mode: in the mode that is on."""
    with _disable_current_modes():  # it may be a fake of another one
        values = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
    dense = torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
    return _laid_out(dense, tensor.layout, values, tensor.dense_dim())


def _laid_out(dense: torch.Tensor, layout: torch.layout, values: torch.Tensor, dense_dim: int) -> torch.Tensor:
    end = values.dim() - dense_dim
    blocks = tuple(values.shape[end - 2 : end]) if layout in _BLOCKED else None
    return dense.to_sparse(layout=layout, blocksize=blocks, dense_dim=dense_dim)

"""Counting one step: every op that torch dispatches, and every tensor that autograd keeps."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclasses.dataclass(frozen=True)
class Counts:
    """Cost of one step.

    Attributes:
        launches: dispatched ops that are neither a view nor a bare allocation; a multi-tensor copy is one.
        casts: launches that only convert one floating dtype to another; `forward_casts` of them in forward.
        tensors_cast: tensors they convert (a bucket of weights is one launch); `forward_tensors_cast` in forward.
        nbytes: every op's inputs read once and outputs written once.
        cast_nbytes: the part of it that casts move.
        saved_nbytes: storages kept for backward, parameters excluded.
    """

    launches: int = 0
    casts: int = 0
    forward_casts: int = 0
    tensors_cast: int = 0
    forward_tensors_cast: int = 0
    nbytes: int = 0
    cast_nbytes: int = 0
    saved_nbytes: int = 0


# Ops that move no data, whatever their schema says.
_ALLOCATIONS = frozenset(
    {
        "_unsafe_view",
        "alias",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
    }
)
# They only write: of their first argument they want the shape.
_FILLS = frozenset(
    {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like", "zeros_like"}
)
_COPIES = frozenset({"copy_", "_copy_from", "_to_copy"})


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs while it is active.

    Attributes:
        is_backward: set by the caller between the two halves of a step.
        cast_log: one line per cast launch, for a reader.
        bytes_of: bytes by op name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self.is_backward = False
        self.cast_log: list[str] = []
        self.bytes_of: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace != "prim" and not func.is_view and name not in _ALLOCATIONS:
            self._count(name, args, kwargs or {}, out)
        return out

    def _count(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        pairs = _copied_pairs(name, args, out)
        if pairs is None:
            read = 0 if name in _FILLS else sum(map(_nbytes, _tensors((args, kwargs))))
            moved = read + sum(map(_nbytes, _tensors(out)))
        else:
            moved = sum(_nbytes(source) + _nbytes(target) for source, target in pairs)
        cast = [pair for pair in pairs or () if _is_cast(*pair)]
        phase = "backward" if self.is_backward else "forward"
        self.bytes_of[f"{phase} {name}"] = self.bytes_of.get(f"{phase} {name}", 0) + moved
        if cast:
            source, target = cast[0]
            self.cast_log.append(
                f"{phase} {len(cast)} x {source.dtype}->{target.dtype} {tuple(source.shape)} {moved / 1e6:.2f} MB"
            )
        self._add(
            launches=1,
            nbytes=moved,
            casts=bool(cast),
            forward_casts=bool(cast) and not self.is_backward,
            tensors_cast=len(cast),
            forward_tensors_cast=0 if self.is_backward else len(cast),
            cast_nbytes=moved if cast else 0,
        )

    def _add(self, **amounts: int) -> None:
        changed = {key: getattr(self.counts, key) + amount for key, amount in amounts.items()}
        self.counts = dataclasses.replace(self.counts, **changed)


def _copied_pairs(name: str, args: Any, out: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """(source, target) of an op that only copies, None for any other op."""
    if name == "_to_copy":
        return [(args[0], out)]
    if name in _COPIES and isinstance(args[1], torch.Tensor):
        return [(args[1], args[0])]
    if name == "_foreach_copy_":
        return list(zip(args[1], args[0], strict=True))
    return None


def _is_cast(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.dtype != target.dtype and source.is_floating_point() and target.is_floating_point()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class SavedTensors:
    """Bytes of the storages that autograd keeps while it is active; a storage counts once."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._excluded = {_storage(parameter) for parameter in parameters}
        self._nbytes: dict[int, int] = {}
        self._alive: list[Any] = []  # a freed storage's address would be given to another
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def nbytes(self) -> int:
        return sum(self._nbytes.values())

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _storage(tensor)
        if key not in self._excluded:
            self._alive.append(tensor.untyped_storage())
            self._nbytes[key] = tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def count_step(forward: Callable[[], torch.Tensor], parameters: Iterable[torch.Tensor]) -> Counts:
    """Cost of `forward().backward()`, which runs once.

    Args:
        forward: from the model's inputs to its loss, with whatever context it needs inside.
        parameters: not counted as saved.
    """
    counter = Counter()
    with counter:
        with SavedTensors(parameters) as saved:
            loss = forward()
        counter.is_backward = True
        # In this thread: a thread of autograd's own could still hold the counter when the interpreter ends.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()  # type: ignore[no-untyped-call]
    return dataclasses.replace(counter.counts, saved_nbytes=saved.nbytes)

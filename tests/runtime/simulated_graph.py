"""A CUDA graph on a CPU: what a step launches is recorded, what its Python does is not; a replay runs the ops alone.

As on a GPU, recording leaves no trace in memory, an op that reads the device or brings numbers from the host is
refused, and a replay works on the memory that the recorded ops had. So a number that Python read while recording stays
what it was, and a change on the host that a replay would need is missing.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp import recorded
from fxamp.runtime import device_skip, graphed_step, step_result

aten = torch.ops.aten
# Their results, or the shapes of these, are numbers on the host.
READS_DEVICE = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
}
# torch.tensor(...) on a GPU copies from memory that is not pinned, and waits.
BRINGS_NUMBERS = {aten.lift_fresh.default}
# Their schema does not say that they write: running statistics.
HIDDEN_WRITES = {aten.native_batch_norm.default: slice(3, 5), aten.cudnn_batch_norm.default: slice(3, 5)}


class NotPermitted(RuntimeError):
    """What CUDA says of such an op while a stream is recorded."""


class Recording(TorchDispatchMode):
    """Notes every op of a step, then puts memory back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self._born: dict[int, torch.UntypedStorage] = {}
        self._random = torch.get_rng_state()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in READS_DEVICE or (func in BRINGS_NUMBERS and not _stays_on_host()):
            raise NotPermitted(f"{func} is not permitted while a stream is capturing")
        for tensor in self._written(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._born and storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage, storage.clone()
        result = func(*args, **kwargs)
        results = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        made = [each for each in results if each.untyped_storage().data_ptr() not in given]
        for each in made:
            self._born[each.untyped_storage().data_ptr()] = each.untyped_storage()
        # What autograd hands on may be written over by detach_ or set_data: the memory is what counts.
        kept = [each.detach() for each in results]
        plain_args, plain_kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        is_new = [each.untyped_storage().data_ptr() not in given for each in results]
        self.calls.append((func, plain_args, plain_kwargs, list(zip(kept, is_new, strict=True))))
        return result

    def _written(self, func, args, kwargs) -> Iterator[torch.Tensor]:
        if func in HIDDEN_WRITES:
            yield from _tensors(args[HIDDEN_WRITES[func]])
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)

    def put_back(self) -> None:
        torch.set_rng_state(self._random)
        for storage, old in self._before.values():
            storage.copy_(old)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, kept in self.calls:
                results = [each for each in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
                for now, (then, is_new) in zip(results, kept, strict=True):
                    if is_new and now.numel():
                        then.copy_(now)


def _stays_on_host() -> bool:
    """Whether somebody asks whose numbers are on the host on a GPU too: an optimizer's counters, a known result."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.optim.") or name == step_result.__name__:
            return True
        if name.startswith("fxamp"):
            return False
        frame = frame.f_back
    return False


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


class Waits(TorchDispatchMode):
    """Notes what would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS_DEVICE and not _stays_on_host():
            self.notes.append(str(func))
        return func(*args, **(kwargs or {}))


class SimulatedGraphs:
    """Puts recordings in the place of CUDA graphs, and a GPU's ways in the place of a CPU's."""

    def __init__(self, monkeypatch) -> None:
        self.captures = 0
        self._is_capturing = False
        monkeypatch.setattr(graphed_step, "Recorder", lambda device: self)
        monkeypatch.setattr(recorded, "is_capturing", lambda device: self._is_capturing)
        monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
                monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu", "cuda"])

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        with Waits() as waits:
            yield waits.notes

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.captures += 1
        recording = Recording()
        self._is_capturing = True
        try:
            with recording:
                made = step()
        finally:
            self._is_capturing = False
            recording.put_back()
        return recording.replay, made

    def step_for(self, *args: Any, **options: Any) -> graphed_step.GraphedStep:
        step = graphed_step.GraphedStep(*args, **options)
        step._why_eager = None
        step._notice = lambda leaves: None
        return step

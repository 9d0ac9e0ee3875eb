"""What several runtime tests share."""

import functools
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ThirdParty(torch.optim.Optimizer):
    """As packages write them: Python counters, a group counter, a global norm, a replaced tensor."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0})
        self.state["calls"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.state["calls"] += 1
        with_grad = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.float().norm() for p in with_grad]).norm()
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["average"] = 0.5 * state.get("average", torch.zeros_like(p)) + p.grad
                p.add_(state["average"] / (1 + total), alpha=-group["lr"] / group["k"] / state["step"])
        return loss


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of storages made inside it and still alive, as large as they are then; `peak` is the most.

    Args:
        others: gives the bytes of others, made before it, that come and go.
    """

    def __init__(self, others=lambda: 0):
        super().__init__()
        self.others = others
        self.peak = 0
        self._seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in filter(_is_tensor, tree_leaves(result)):
            storage = leaf.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._seen:
                self._seen[storage._cdata] = weakref.ref(storage, functools.partial(self._forget, storage._cdata))
        alive = [storage for reference in self._seen.values() if (storage := reference()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive) + self.others())
        return result

    def _forget(self, key, reference):
        if self._seen.get(key) is reference:
            del self._seen[key]


def _is_tensor(value):
    return isinstance(value, torch.Tensor)


class NoSync(TorchDispatchMode):
    """Refuses every op that makes the host wait for a device value.

    What reads a CPU tensor without an op (`tolist()`, `numpy()`) it does not see: tests/runtime/fake_cuda_steps.py
    does.
    """

    REFUSED = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.REFUSED:
            raise AssertionError(f"host sync: {func}")
        return func(*args, **(kwargs or {}))

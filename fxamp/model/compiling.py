"""torch.compile around a converted model: the graph of a call is made before Dynamo looks for it.

Dynamo cannot trace a capture. It can run a function while it compiles (`torch._dynamo.comptime`), with what it knows of
the call by then: sizes, dtypes and devices. A graph is made with that, on the real model; what Dynamo traces next
finds it, by its number: it asks no other graph whether it holds, so that guards say nothing of others, and what was
compiled stays when others are made. Where guards see that the model has changed, Dynamo compiles again, and comes
through here again.
"""

import logging
import threading
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from fxamp.capture.size_guards import VARYING
from fxamp.capture.sizes import varying_sizes
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of
from fxamp.recorded import as_if_recorded

log = logging.getLogger("fxamp")

_made = threading.local()
_SOME_SIZE = 8


def make_ready(context: Any) -> None:
    """Make the graph for a call of `self` with `args` and `kwargs`, locals of the frame that Dynamo traces.

    Where symbolic capture cannot follow the call, Dynamo's graph breaks here, or its error says why where it must not
    break. Arguments that Dynamo does not hold as plain values are left to what is traced next.
    """
    _made.number = None
    torch.compiler.assume_constant_result(_fxamp_graph_made_ready)  # type: ignore[no-untyped-call]
    module, args, kwargs = (_tracked(context, name) for name in ("self", "args", "kwargs"))
    engine = engine_of(getattr(module, "value", None))
    if engine is None:
        return
    engine.is_trained = True  # as far as can be told: the gradient mode of calls to come is not known
    name = type(module.value).__qualname__
    engine.otherwise.stay_outside(name)
    if engine.options.capture == "dynamo":
        return
    try:
        call = args.as_proxy(), kwargs.as_proxy()
        with temporarily_clear_interpreter_stack():  # torch.func's transforms allow no requires_grad_
            args, kwargs = _samples(call)
        sizes_vary = bool(varying_sizes(pytree.tree_leaves((args, kwargs))))
        with as_if_recorded():
            made = engine.current(module.value).capture(module.value, args, kwargs, sizes_vary=sizes_vary)
        _made.number = made.number
    except CaptureError as error:
        context.graph_break(f"fxamp has no graph for this call of {name}: {error}")
    except NotImplementedError as error:  # an argument that has no place in Dynamo's graph
        log.debug("no graph was made for torch.compile: %s", error)


def graph_made_ready() -> str | None:
    """The number of the graph that `make_ready` has made for the call that Dynamo traces; None where it made none."""
    return _fxamp_graph_made_ready() if torch.compiler.is_dynamo_compiling() else None


def _fxamp_graph_made_ready() -> str | None:  # Dynamo keeps what it returns under this name among the globals
    return getattr(_made, "number", None)


def watch(module: nn.Module) -> bool:
    """Read which modules a model has, so that Dynamo's guards see when one is exchanged.

    Hooks that are added after the first call are not seen: `torch._dynamo.config.skip_nnmodule_hook_guards`.
    """
    return all(child is None or (id(child) != 0 and watch(child)) for child in module._modules.values())


def _tracked(context: Any, name: str) -> Any:
    return context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()


def _samples(call: Any) -> Any:
    """Tensors and numbers such as those that the call is compiled for, one of each that it is given."""
    made: dict[fx.Node, Any] = {}

    def sample(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Proxy):
            return leaf
        if leaf.node not in made:
            made[leaf.node] = _sample(leaf)
        return made[leaf.node]

    return pytree.tree_map(sample, call)


def _sample(leaf: fx.Proxy) -> Any:
    """One of them; sizes that may vary are one, marked."""
    known = leaf.node.meta["example_value"]
    if not isinstance(known, torch.Tensor):
        return _hint(known)
    try:
        sizes, strides = tuple(map(_hint, known.shape)), tuple(map(_hint, known.stride()))
        made = torch.empty_strided(sizes, strides, dtype=known.dtype, device=known.device).zero_()
    except NotImplementedError:  # a size that hangs on data
        made = torch.zeros([_hint(size, _SOME_SIZE) for size in known.shape], dtype=known.dtype, device=known.device)
    setattr(made, VARYING, tuple(dim for dim, size in enumerate(known.shape) if isinstance(size, torch.SymInt)))
    return made.requires_grad_(known.requires_grad)


def _hint(number: Any, default: Any = None) -> Any:
    """What a number is in the call that is compiled for.

    Raises:
        NotImplementedError: it hangs on data, and there is no default.
    """
    if not isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
        return number
    if number.node.has_hint():
        return number.node.hint
    if default is None:
        raise NotImplementedError(f"{number} hangs on data")
    return default

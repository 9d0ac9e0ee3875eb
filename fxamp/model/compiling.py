"""torch.compile around a converted model: the graph of a call is made before Dynamo looks for it.

Dynamo cannot trace a capture. It can run a function while it compiles (`torch._dynamo.comptime`), with what it knows of
the call by then: sizes, dtypes and devices. A graph is made with that, on the real model; what Dynamo traces next
finds it, by its number: it asks no other graph whether it holds, so that guards say nothing of others, and what was
compiled stays when others are made.

What a graph takes for granted of the model, Dynamo never sees, for the graph does not read it. So what is compiled has
one guard more, which asks at each call what a call that is not compiled asks. Where it no longer holds, Dynamo compiles
again, and comes through here again.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from fxamp.capture.modes import follow_modules
from fxamp.capture.size_guards import VARYING
from fxamp.capture.sizes import varying_sizes
from fxamp.errors import CaptureError
from fxamp.model.as_made import question
from fxamp.model.engine import engine_of
from fxamp.recorded import as_if_recorded

log = logging.getLogger("fxamp")

_made = threading.local()
_SOME_SIZE = 8


def make_ready(context: Any) -> None:
    """Make the graph for a call of `self` with `args` and `kwargs`, locals of the frame that Dynamo traces.

    Where symbolic capture cannot follow the call, Dynamo's graph breaks here, or its error says why where it must not
    break. Where Dynamo does not hold the arguments as plain values, what is traced next chooses among the graphs that
    there are.
    """
    _made.numbers = ""
    torch.compiler.assume_constant_result(_fxamp_graphs_made_ready)  # type: ignore[no-untyped-call]
    tracked, args, kwargs = (_tracked(context, name) for name in ("self", "args", "kwargs"))
    module: Any = getattr(tracked, "value", None)
    engine = engine_of(module)
    if engine is None:
        return
    engine = engine.current(module)
    engine.is_trained = True  # as far as can be told: the gradient mode of calls to come is not known
    name = type(module).__qualname__
    engine.otherwise.stay_outside(name)
    if engine.options.capture == "dynamo":
        return
    if follow_modules():
        context.graph_break(f"fxamp has no graph for this call of {name}: hooks follow all modules")
    try:
        call = args.as_proxy(), kwargs.as_proxy()
        with temporarily_clear_interpreter_stack():  # torch.func's transforms allow no requires_grad_
            args, kwargs = _samples(call)
        sizes_vary = bool(varying_sizes(pytree.tree_leaves((args, kwargs))))
        with as_if_recorded():
            variants = [engine.capture(module, args, kwargs, sizes_vary=sizes_vary)]
    except CaptureError as error:
        context.graph_break(f"fxamp has no graph for this call of {name}: {error}")
    except NotImplementedError as error:  # an argument that has no place in Dynamo's graph
        log.debug("no graph was made for torch.compile: %s", error)
        variants = [variant for variant in engine.own_variants() if variant.is_for_model(module)]
    is_as_compiled = question(module, engine, variants)
    if tracked.source is None or not is_as_compiled(module):
        context.graph_break(f"{name} is another at each call")
    _guard(tracked.source, is_as_compiled, f"fxamp: {name} is as it was when its graph was made")
    _made.numbers = " ".join(variant.number for variant in variants)


def graphs_made_ready() -> list[str] | None:
    """The numbers of the graphs that `make_ready` has found for the call that Dynamo traces; None of other calls."""
    return _fxamp_graphs_made_ready().split() if torch.compiler.is_dynamo_compiling() else None


def _fxamp_graphs_made_ready() -> str:  # Dynamo keeps what it returns under this name among the globals
    """A text, which Dynamo takes for what it is. Once: what is compiled later, behind a break, has no guard."""
    numbers: str = getattr(_made, "numbers", "")
    _made.numbers = ""
    return numbers


def _guard(source: Any, question: Callable[[Any], bool], text: str) -> None:
    """Have Dynamo ask a question about the object from a source before what it compiles now runs.

    At the root of the guards, as Dynamo's own about global state: those of a module it may leave out as long as the
    dictionaries of its modules stay as they are (`torch._dynamo.config.use_recursive_dict_tags_for_guards`).
    """
    from torch._dynamo.guards import install_guard

    def FXAMP_STATE(builder: Any, guard: Any) -> None:  # Dynamo's own are spelt so, in what it prints
        found, space = compile(guard.name, "<guard>", "eval"), builder.scope["G"]

        def holds(frame: Any) -> bool:
            try:
                return question(eval(found, {"G": space, "L": frame}))
            except Exception:  # another object stands there, or what was asked about is gone; Dynamo would fail, too
                return False

        builder.guard_manager.root.add_lambda_guard(holds, [text], guard.user_stack)

    install_guard(source.make_guard(FXAMP_STATE))


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

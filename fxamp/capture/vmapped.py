"""A function under `torch.vmap` as one node of a graph: what it does for one sample is a graph of its own.

    torch.vmap(distance, in_dims=(0, None))(rows, centre)     # one node, named like `distance`

The function is traced once, for one sample. What it reads besides its arguments, such as a tensor of the function
around it, becomes an argument that all samples share. At each call the graph of a sample runs under torch's own vmap.
It runs in float32 as a whole, or low as a whole: what is cast inside is what the function itself casts.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._functorch import apis
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.creations import holds_proxy
from fxamp.capture.functions import named_like
from fxamp.capture.locations import user_line
from fxamp.capture.low_samples import all_may_be_low, ops_inside
from fxamp.checks import require
from fxamp.draws import draw
from fxamp.errors import CaptureError
from fxamp.patched import patched
from fxamp.powers import call_power
from fxamp.switches import set_switches, switches_found

if TYPE_CHECKING:
    from fxamp.capture.tracer import SymbolicTracer


@contextlib.contextmanager
def vmapped_functions(tracer: "SymbolicTracer") -> Iterator[None]:
    """`torch.vmap` of traced values makes a node."""
    module: Any = apis
    original = module.vmap_impl

    def vmap_impl(
        function: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not tracer.is_recording or not holds_proxy((args, kwargs)):
            return original(function, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
        run_all = functools.partial(torch.vmap, randomness=randomness, chunk_size=chunk_size)
        return _Sample(tracer, function, in_dims, args, kwargs).node(run_all, out_dims)

    with patched((module, "vmap_impl", vmap_impl)):
        yield


class _Sample:
    """A function, traced for one sample.

    Args:
        in_dims: as torch.vmap takes them, for `args`; all samples share `kwargs`.

    Raises:
        CaptureError: it does what torch does for all samples at once only, or decides on sizes.
    """

    def __init__(
        self, tracer: "SymbolicTracer", function: Callable[..., Any], in_dims: Any, args: Any, kwargs: Any
    ) -> None:
        self.tracer, self.function = tracer, function
        flat, form = pytree.tree_flatten((args, kwargs))
        dims = pytree._broadcast_to_and_flatten((in_dims, None), form)
        if dims is None:
            raise CaptureError(
                f"{user_line()}: torch.vmap is given in_dims={in_dims!r}, which do not fit its arguments"
            )
        self.graph = fx.Graph()
        self.dims = [dim for dim in dims if dim is not None]
        decided = tracer.questions.state()
        with tracer.inside(self.graph):
            samples = [self._sample(value, dim) for value, dim in zip(flat, dims, strict=True)]
            args, kwargs = pytree.tree_unflatten(samples, form)
            results, self.form = pytree.tree_flatten(function(*args, **kwargs))
            if not all(issubclass(type(each), (fx.Proxy, torch.Tensor)) for each in results):
                raise CaptureError(f"{user_line()}: a function under torch.vmap gives something that is no tensor")
            self.graph.output(tuple(map(tracer.create_arg, results)))
        if tracer.questions.state() != decided:
            raise CaptureError(f"{user_line()}: a function under torch.vmap decides on sizes, or on what inputs hold")
        self.inside, self.may_be_low = ops_inside(self.graph), all_may_be_low(self.graph)
        self.given = self._with_arguments()
        self._check()

    def _sample(self, value: Any, dim: int | None) -> Any:
        """What the function is given of an argument."""
        if dim is None:
            return value
        sample = self.tracer.create_proxy("call_function", _sample_of, (value, dim), {})
        sample.node.meta[ir.SAMPLE] = True
        return sample

    def _with_arguments(self) -> list[fx.Node]:
        """Make placeholders of the samples, then of what lies in the graph around; gives what they stand for."""
        whole: list[fx.Node] = []
        inside: dict[fx.Node, fx.Node] = {}
        samples = self.graph.find_nodes(op="call_function", target=_sample_of)
        with self.graph.inserting_before(next(node for node in self.graph.nodes if node not in samples)):
            for node in samples:
                whole += node.all_input_nodes
                node.replace_all_uses_with(self.graph.placeholder(f"sample_{len(whole)}"))
                self.graph.erase_node(node)
            for node in list(self.graph.nodes):
                for read in (each for each in node.all_input_nodes if each.graph is not self.graph):
                    if read not in inside:
                        inside[read] = self.graph.placeholder(f"shared_{len(inside)}")
                    node.replace_input_with(read, inside[read])
        return [*whole, *inside]

    def _check(self) -> None:
        for node in self.graph.nodes:
            line = node.meta.get("source") or user_line()
            if node.op == "call_module" or node.target in _FOR_ALL:
                what = node.target if node.op == "call_module" else getattr(node.target, "__name__", node.target)
                raise CaptureError(
                    f"{line}: a function under torch.vmap calls {what!r}, which a graph of one sample cannot hold. "
                    "Call it outside of the function."
                )

    def node(self, run_all: Callable[..., Any], out_dims: Any) -> Any:
        """What all samples give together: proxies in the form of what the function gives."""
        dims = pytree._broadcast_to_and_flatten(out_dims, self.form)
        if dims is None:
            raise CaptureError(
                f"{user_line()}: torch.vmap is given out_dims={out_dims!r}, which do not fit its results"
            )
        in_dims = (*self.dims, *(None for _ in self.given[len(self.dims) :]))
        function = named_like(_run(self.graph, run_all, in_dims, tuple(dims)), self.function)
        made: Any = self.tracer.create_proxy("call_function", function, tuple(map(self.tracer.proxy, self.given)), {})
        made.node.meta.update({ir.INSIDE: self.inside, ir.MAY_BE_LOW: self.may_be_low})
        return pytree.tree_unflatten([made[place] for place in range(len(dims))], self.form)


_FOR_ALL: tuple[Any, ...] = (
    *(require, torch._assert, draw, set_switches, switches_found),
    *(torch._C._set_grad_enabled, torch.is_grad_enabled),
)


def _sample_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Stands for one sample while the function is traced: nothing that hangs on it hangs on inputs alone."""
    return tensor.select(dim, 0)


def _run(
    graph: fx.Graph, run_all: Callable[..., Any], in_dims: Sequence[int | None], out_dims: Sequence[int | None]
) -> Callable[..., Any]:
    for node in graph.nodes:
        call_power(node, gives_tensor=isinstance(node.meta.get("val"), torch.Tensor))
    sample = fx.GraphModule(nn.Module(), graph).forward

    def vmapped(*values: Any) -> Any:
        return run_all(sample, in_dims, out_dims)(*values)

    return vmapped


def index_of_tensors(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """`x[i, j]` by tensors as torch's op, which needs none of their numbers: Python's asks each for its own."""
    if target is not operator.getitem or not isinstance(args[0], torch.Tensor):
        return target, args
    places = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(isinstance(place, torch.Tensor) for place in places):
        return target, args
    return torch.ops.aten.index.Tensor, (args[0], list(places))

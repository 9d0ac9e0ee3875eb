"""How the arguments of a call become the inputs of a graph.

A call `forward(x, mask=None, flag=True)` is described by a `CallSpec`: tensors and numbers become graph inputs,
everything else (None, bool, str, containers' shape) is part of the spec, and a graph is valid for one spec only.
"""

import collections
import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import CaptureError, InputError, OptionError
from fxamp.sparse import kind_of

CONSTANTS = (type(None), bool, str, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """Structure of one call: what is an input of the graph and what is a constant of it.

    Attributes:
        tree: pytree structure of (args, kwargs).
        leaves: for each leaf ("tensor", see `kind_of`), ("number", type) or ("constant", value).
    """

    tree: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]

    def describe(self) -> str:
        """Readable form: "(float32 tensor, None)"."""
        return "(" + ", ".join(_words(kind, value) for kind, value in self.leaves) + ")"


def _words(kind: str, value: Any) -> str:
    if kind == "tensor":
        dtype, dimensions, *layout = value
        layouts = [str(each).removeprefix("torch.") for each in layout[:1]]
        words = " ".join([*layouts, f"tensor of {dimensions} dimensions"])
        return "tensor" if dtype is None else f"{dtype_name(dtype)} {words}"
    return str(value.__name__) if kind == "number" else repr(value)


_CONTAINERS = (tuple, list, dict, collections.OrderedDict, collections.defaultdict)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallSpec, list[Any]]:
    """The spec of a call, and the values of its graph inputs in order.

    Raises:
        CaptureError: an argument is neither tensor, number, constant nor a container of them.
    """
    flat, tree = pytree.tree_flatten((args, kwargs))
    _check_containers(tree)
    leaves = tuple(_describe_leaf(value) for value in flat)
    inputs = [value for value, (kind, _) in zip(flat, leaves, strict=True) if kind != "constant"]
    return CallSpec(tree, leaves), inputs


def _check_containers(tree: pytree.TreeSpec) -> None:
    """A container that is no built-in one may be written into by forward, which flat inputs would not show."""
    kind = tree.type
    if kind is not None and kind not in _CONTAINERS and kind is not collections.namedtuple:
        raise CaptureError(f"an argument is a {kind.__qualname__}, which symbolic capture does not take apart")
    for child in tree.children():
        _check_containers(child)


def _is_member(value: Any) -> bool:
    """Whether a value is a member of an Enum, an IntEnum's too, which forward may ask for by `is`.

    Combinations of flags are none: a graph's code has no name for them.
    """
    return isinstance(value, enum.Enum) and value.name is not None and "|" not in value.name


def _describe_leaf(value: Any) -> tuple[str, Any]:
    if isinstance(value, torch.Tensor):
        return "tensor", kind_of(value)
    if isinstance(value, CONSTANTS) or _is_member(value):
        return "constant", value
    if isinstance(value, (int, float, complex)):
        return "number", type(value)
    if isinstance(value, fx.Proxy):
        raise fx.proxy.TraceError("an argument is a proxy of torch.fx")
    raise CaptureError(
        f"an argument of type {type(value).__qualname__} cannot be an input of a graph. Pass tensors, numbers and "
        "containers of them, or register the type with torch.utils._pytree.register_pytree_node."
    )


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What tells calls apart that need graphs of their own, and the values of the graph's inputs in order.

    It comes to what `flatten_call` describes, in plain tuples: that is faster, and Dynamo can hash it.

    Raises:
        CaptureError: an argument is neither tensor, number, constant nor a container of them.
    """
    inputs: list[Any]
    key: tuple[Any, ...]
    if not kwargs and all(isinstance(value, torch.Tensor) for value in args):
        key, inputs = tuple([kind_of(value) for value in args]), list(args)
    else:
        inputs = []
        key = _structure(args, inputs), _structure(kwargs, inputs)
    if len(inputs) > 1 and not torch.compiler.is_dynamo_compiling() and (twins := twins_among(inputs)):
        key = *key, twins
    return key, inputs


def twins_among(inputs: list[Any]) -> tuple[int, ...]:
    """For each input the place of the first one that is the same tensor, which forward may ask for by `is`; () where
    all are different.
    """
    if len(set(map(id, inputs))) == len(inputs):
        return ()
    first: dict[int, int] = {}
    tensors = [isinstance(value, torch.Tensor) for value in inputs]
    places = (
        first.setdefault(id(value), place) if is_tensor else place
        for place, (value, is_tensor) in enumerate(zip(inputs, tensors, strict=True))
    )
    found = tuple(places)
    return () if found == tuple(range(len(inputs))) else found


def of_each(function: Callable[[Any], Any], inputs: list[Any]) -> list[Any]:
    """What a function gives for each input, once for one that stands in several places."""
    made = {id(value): function(value) for value in inputs}
    return [made[id(value)] for value in inputs]


def _structure(value: Any, inputs: list[Any]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        inputs.append(value)
        return kind_of(value)
    if isinstance(value, CONSTANTS):
        return "constant", kind, value
    if _is_member(value):
        return "constant", kind, value.name  # which can be hashed, whatever the class says of its members
    if isinstance(value, (int, float, complex)):
        inputs.append(value)
        return kind
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return (kind, tuple(value), *[_structure(item, inputs) for item in value.values()])
    if kind in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return (kind, *[_structure(item, inputs) for item in value])
    flatten_call((value,), {})  # says what is wrong with it
    raise CaptureError(f"an argument is a {kind.__qualname__}, which symbolic capture does not take apart")


def unflatten_call(spec: CallSpec, inputs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call again, with `inputs` in the places of its tensors and numbers."""
    remaining = iter(inputs)
    flat = [value if kind == "constant" else next(remaining) for kind, value in spec.leaves]
    args, kwargs = pytree.tree_unflatten(flat, spec.tree)
    return tuple(args), dict(kwargs)


def normalise_example(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """`example_inputs` of convert() as `call_arguments` gives them; None where there are none."""
    return None if example_inputs is None else call_arguments(example_inputs, "example_inputs")


def call_arguments(given: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of one call as (args, kwargs).

        call_arguments(x, "inputs") == call_arguments([x], "inputs") == ((x,), {})

    Args:
        given: a tensor, a tuple or list of arguments, (args, kwargs), or a dict of keywords.
        name: of the public function's argument, by which they came.

    Raises:
        OptionError: anything else.
    """
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, dict):
        return (), dict(given)
    if isinstance(given, (tuple, list)):
        if len(given) == 2 and isinstance(given[0], (tuple, list)) and isinstance(given[1], dict):
            return tuple(given[0]), dict(given[1])
        return tuple(given), {}
    kind = "None" if given is None else f"a {type(given).__qualname__}"
    raise OptionError(f"{name} is {kind}. Give a tensor, a tuple of arguments, (args, kwargs), or a dict of keywords.")


def check_call_fits(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise an OptionError where (args, kwargs) do not fit `forward`'s signature."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise OptionError(
            f"example_inputs do not fit {type(model).__qualname__}.forward{signature}: {error}. "
            "Give the arguments of one real call: a tuple of args, or (args, kwargs)."
        ) from None


def misfit(line: str, op: str, error: Exception, inputs: list[Any]) -> InputError:
    """The error of a call whose inputs make an operation of the model fail, as one that names them."""
    given = ", ".join(map(_in_words, inputs))
    text = str(error).strip().splitlines()
    why = text[0].rstrip(". ") if text else type(error).__name__
    low = [value for value in inputs if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES]
    remedy = f", such as x.float() in the place of {_in_words(low[0])}" if low else ""
    return InputError(
        f"{line and line + ': '}the model fails in {op} when it is called with ({given}): {why}. "
        f"Give inputs with which the unconverted model runs{remedy}. Where it runs with these, only the capture cannot "
        "follow this line: capture='dynamo' leaves it as it is written, and boundaries= converts the submodules alone."
    )


def refused_low_inputs(model: nn.Module, flat: list[Any], error: Exception) -> InputError | None:
    """What to say where mixed dtypes stopped a call with low inputs of a float32 model; None for another error."""
    low = [value for value in flat if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES]
    is_float32 = any(weight.dtype == torch.float32 for weight in model.parameters())
    if not low or not is_float32 or "type" not in str(error):
        return None
    name = type(model).__qualname__
    return InputError(
        f"{name} was called with a {_in_words(low[0])}, and its parameters are float32. Dynamo, which captures it, "
        "refuses the two together, where torch.autocast casts: pass x.float() in its place."
    )


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{dtype_name(value.dtype)} tensor of shape {tuple(value.shape)}"


def has_only_defaults(model: nn.Module) -> bool:
    """Whether forward can be called without arguments, and takes some: nothing tells then which it will be given."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    can_be_left_out = (each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in parameters)
    return bool(parameters) and all(can_be_left_out)


def unknown_call(model: nn.Module) -> CallSpec:
    """The spec to assume where no example inputs are known: each argument without a default is one tensor.

    Raises:
        CaptureError: forward takes *args and nothing tells how many.
    """
    signature = inspect.signature(type(model).forward)
    required: list[str] = []
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL and not required:
            raise CaptureError(
                f"{type(model).__qualname__}.forward{signature} takes any number of arguments. "
                "Pass example_inputs to fxamp.convert."
            )
        if parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            required.append(parameter.name)
    _, tree = pytree.tree_flatten((tuple(0 for _ in required), {}))
    return CallSpec(tree, tuple(("tensor", (None, None)) for _ in required))

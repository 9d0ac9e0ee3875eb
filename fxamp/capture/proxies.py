"""The values a traced forward handles: proxies that stay honest about writes and about Python's questions."""

import collections.abc
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp.capture.guesses import known_or_guessed
from fxamp.capture.identity import is_asked_for_its_class, is_compared_by_identity
from fxamp.capture.locations import asker, user_line
from fxamp.capture.numbers import operator_of, plain_number
from fxamp.capture.ranks import LOOSE_RANK
from fxamp.errors import CaptureError
from fxamp.fakes import UNKNOWN
from fxamp.inplace import INPLACE_OPERATORS

if TYPE_CHECKING:
    from fxamp.capture.questions import Questions


def questions_of(proxy: fx.Proxy) -> "Questions":
    """Those of the trace that a proxy belongs to."""
    return proxy.tracer.questions  # type: ignore[attr-defined, no-any-return]


def rank_of(value: Any) -> int | None:
    """Number of dimensions of a traced or real tensor, None where it is not known.

    Where sizes decide on it, that it was asked for is a decision on sizes.
    """
    if issubclass(type(value), fx.Proxy):
        traced, value = value, known_or_guessed(value.node)
        if traced.node.meta.get(LOOSE_RANK):
            if "val" not in traced.node.meta:
                return None
            questions_of(traced).decide_on_rank(traced.node)
    return int(value.dim()) if isinstance(value, torch.Tensor) else None


_OF_MEMORY = frozenset(
    "is_contiguous stride storage_offset dim_order data_ptr is_pinned is_shared _is_view untyped_storage".split()
)


def asks_of_autograd(node: fx.Node) -> bool:
    """Whether a value follows from a flag that sizes and dtypes do not decide: the next call may answer otherwise."""
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("requires_grad", "is_leaf", "retains_grad", "output_nr", "_version")
    if node.op == "call_method" and node.target in _OF_MEMORY:
        return True
    if isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return any(asks_of_autograd(given) for given in node.all_input_nodes)


def gives_parts(node: fx.Node) -> bool:
    """Whether a module that stays whole gives no tensor, but something whose parts may be None at one call alone."""
    return node.op == "call_module" and not isinstance(node.meta.get("val", UNKNOWN), torch.Tensor)


def opened(value: Any, traced: Any) -> Any:
    """A container as one of Python's own, that what it holds is taken out of: asked and returned like any other.

    Args:
        value: what the container is for the example.
        traced: the proxy that stands for it.
    """
    if not isinstance(value, (dict, list, tuple)) or pytree.tree_is_leaf(value):
        return traced
    parts, form = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    places = list(value) if isinstance(value, dict) else range(len(parts))
    items = [traced[place] for place in places]
    questions_of(traced).take_for_all(traced, items)
    return pytree.tree_unflatten(list(map(opened, parts, items)), form)


def kind_of_dictionary(given: Any) -> type | None:
    """The class of a dictionary among arguments that a graph cannot make: one that is not Python's own."""
    if isinstance(given, dict) and type(given) not in (dict, collections.OrderedDict, collections.defaultdict):
        return type(given)
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else ()
    return next(filter(None, map(kind_of_dictionary, parts)), None)


_OF_PROXIES = frozenset({"node", "tracer"})
# None or not, whoever asks: no proxy can be None where the next call's tensor is.
_OF_AUTOGRAD = frozenset({"grad_fn", "grad", "_base", "_backward_hooks"})
# Facts of a tensor that its graph is for, and that no cast changes.
_PLAIN = frozenset({"ndim", "layout", "is_cuda", "is_sparse", "is_sparse_csr", "is_nested", "is_quantized"})


class ValueProxy(fx.Proxy):
    """A proxy that stays honest about in-place writes and about Python's questions."""

    def __getattr__(self, k: str) -> Any:
        value, guessed = self.node.meta.get("val", UNKNOWN), known_or_guessed(self.node)
        if k in ("_is_param", "_is_buffer"):  # asked by isinstance(x, nn.Parameter) and (x, nn.Buffer)
            self._note_kind(k)
            return getattr(value, k, False)
        if k == "persistent" and getattr(value, "_is_buffer", False):  # asked where it is set as an attribute
            return value.persistent
        if k in _OF_AUTOGRAD and isinstance(guessed, torch.Tensor):
            raise questions_of(self).unfollowable(
                f"Python's look at .{k}, which is what autograd or memory layout says", by_example=False
            )
        if not _has(guessed, k) or (isinstance(guessed, torch.Tensor) and not self._has_real(k)):
            raise AttributeError(f"{type(guessed).__name__!r} object has no attribute {k!r}")
        if (isinstance(value, torch.Tensor) and k in _PLAIN) or isinstance(value, torch.device):
            return rank_of(self) if k == "ndim" else getattr(value, k)
        if value is UNKNOWN and k in ("device", "is_cuda") and self.tracer.example is None:  # type: ignore[attr-defined]
            kind = self.tracer.device_type  # type: ignore[attr-defined]  # a preview: as the weights are
            return torch.device(kind) if k == "device" else kind == "cuda"
        attribute = AttributeProxy(self, k)
        if value is not UNKNOWN and not isinstance(value, torch.Tensor) and getattr(value, k) is None:
            questions_of(self).take_for_none(attribute)
            return None
        if not callable(getattr(torch.Tensor, k, str)):  # .T, .data, .shape: what it is now, in this region
            found = attribute.node.meta.get("val", UNKNOWN)
            is_plain = not isinstance(found, torch.Tensor | torch.Size)  # a shape is another object each time
            if found is not UNKNOWN and is_plain:
                if found is None:  # .name: so it is at every call
                    return None
                if is_compared_by_identity(asker(1)):
                    return questions_of(self).decide(attribute, "is")
            if isinstance(found, torch.Size):
                return self.tracer.proxy(attribute.node)
        return attribute

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """What `copy.deepcopy` makes of it: of a tensor, one of its own numbers. (A copy of a proxy would be one of all
        its graph.)

        Raises:
            CaptureError: it has a gradient, and the copy would be a leaf, or, in the middle of a graph, torch's error.
        """
        value = known_or_guessed(self.node)
        if not isinstance(value, torch.Tensor):
            return self
        if (self if isinstance(self, WeightProxy) else value).requires_grad:
            raise CaptureError(f"{user_line()}: forward copies a tensor that requires grad by copy.deepcopy")
        return self.detach().clone()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A tensor's or a number's where Python code asks for it; its own where C code does, which would believe it."""
        if not is_asked_for_its_class(asker(1)) or not is_value(self):
            return type(self)
        value = known_or_guessed(self.node)
        if value is UNKNOWN and self.tracer.example is not None:  # type: ignore[attr-defined]
            raise questions_of(self).unfollowable("the class of a value whose sizes depend on data", data=True)
        if isinstance(value, torch.Tensor):
            weight = self.__dict__.get("_tensor")
            return torch.Tensor if weight is None else type(weight)
        return type(self) if value is UNKNOWN else type(value)

    def _has_real(self, name: str) -> bool:
        """Whether a tensor has an attribute; only the model's own and the call's can have one that torch's have not.

        The graph is for calls in which they have it, or have it not, as here.
        """
        if hasattr(torch.Tensor, name):
            return True
        if self.node.op != "placeholder":
            return False
        example, place = self.tracer.example, self._place()  # type: ignore[attr-defined]
        if hasattr(example[place], name):
            raise CaptureError(f"{user_line()}: forward reads .{name}, which the caller has set on an input tensor")
        self.tracer.attributes[place, name] = False  # type: ignore[attr-defined]
        return False

    def _place(self) -> int:
        """Of an input among all."""
        return self.node.graph.find_nodes(op="placeholder").index(self.node)

    def _note_kind(self, name: str) -> None:
        """An input may be a parameter in one call, and none in the next; the graph is for what it is in this one."""
        example = self.tracer.example  # type: ignore[attr-defined]
        if name == "_is_param" and self.node.op == "placeholder" and example is not None:
            place = self._place()
            self.tracer.attributes[place, name] = isinstance(example[place], nn.Parameter)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_PROXIES or not hasattr(torch.Tensor, name):
            super().__setattr__(name, value)
            return
        if name == "requires_grad" and self.node.op != "get_attr":
            self.requires_grad_(value)
            return
        raise CaptureError(
            f"{user_line()}: forward sets .{name} of a tensor, which a graph cannot hold. Write the numbers with "
            "tensor.copy_() under torch.no_grad(), and the rest outside of forward."
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __len__(self) -> int:
        value = self.node.meta.get("val", UNKNOWN)
        if isinstance(value, (tuple, list, torch.Size)):
            questions_of(self).count_items(self)
            return len(value)
        if isinstance(value, torch.Tensor):
            return questions_of(self).size(self, 0)
        if (many := questions_of(self).many_of(self)) is not None:
            return many
        raise questions_of(self).unfollowable("len() of a traced value")

    def __index__(self) -> int:
        return int(questions_of(self).decide(self, "int"))

    def __hash__(self) -> int:
        """That of a number, a dtype or a device, so that sets and dictionaries know it; else the proxy's own."""
        value = known_or_guessed(self.node)
        if isinstance(value, _HASHED):
            questions_of(self).has_hashed = True
            return hash(questions_of(self).decide(self, "hash"))
        return id(self)

    def __format__(self, how: str) -> str:
        return questions_of(self).text(self, how)

    def __str__(self) -> str:
        return self.__format__("")

    def __repr__(self) -> str:
        """That of a number, a dtype or a device, so that texts of tuples know it; else the proxy's own."""
        if is_value(self) and isinstance(self.node.meta.get("val", UNKNOWN), _HASHED):
            return repr(questions_of(self).decide(self, "repr"))
        return super().__repr__()

    def __int__(self) -> int:
        return int(questions_of(self).decide(self, "int"))

    def __float__(self) -> float:
        return float(questions_of(self).decide(self, "float"))

    def __round__(self, digits: int | None = None) -> Any:
        return round(questions_of(self).decide(self, "round"), digits)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy  # it asks, so it is there

        return numpy.asarray(questions_of(self).decide(self, "numpy.asarray"), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """`np.ceil(x.shape[0] / 4)` decides on a size; `np.float32(2) * x` is x's own operator, as in eager."""
        traced = [given.node.meta.get("val", UNKNOWN) for given in inputs if issubclass(type(given), fx.Proxy)]
        own = operator_of(ufunc, method, inputs)
        if own is not None and not kwargs and any(isinstance(value, torch.Tensor) for value in traced):
            return own(*map(plain_number, inputs))
        numbers = [
            questions_of(self).decide(given, f"numpy.{ufunc.__name__}") if issubclass(type(given), fx.Proxy) else given
            for given in inputs
        ]
        return getattr(ufunc, method)(*numbers, **kwargs)

    def __contains__(self, item: Any) -> bool:
        if isinstance(self.node.meta.get("val", UNKNOWN), (tuple, list)):
            return any(part is item or bool(part == item) for part in self)
        raise questions_of(self).unfollowable("'in' on a traced value")

    def numpy(self, *, force: bool = False) -> Any:
        raise questions_of(self).unfollowable(".numpy() of a traced value", data=True)

    def dim(self) -> Any:
        rank = rank_of(self)
        return rank if rank is not None else AttributeProxy(self, "dim")()

    def is_floating_point(self) -> Any:
        value = self.node.meta.get("val", UNKNOWN)
        return (
            value.is_floating_point()
            if isinstance(value, torch.Tensor)
            else AttributeProxy(self, "is_floating_point")()
        )


def _has(value: Any, name: str) -> bool:
    """Whether a value may have an attribute: of one that is not known, and of tensors, protocols alone are asked."""
    if value is UNKNOWN or isinstance(value, torch.Tensor):
        return not name.startswith("__") or hasattr(torch.Tensor, name)
    return hasattr(value, name)


_HASHED = (bool, int, float, str, torch.dtype, torch.device, torch.Size)


def _inplace_operator(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def write(self: ValueProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return write


for _function in (*INPLACE_OPERATORS, operator.imatmul):
    setattr(ValueProxy, f"__{_function.__name__}__", _inplace_operator(_function))


class WeightProxy(ValueProxy):
    """A parameter or buffer: its sizes are constants of the graph."""

    def __init__(self, node: fx.Node, tracer: Any, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.__dict__["_tensor"] = tensor

    def _has_real(self, name: str) -> bool:
        if hasattr(torch.Tensor, name):
            return True
        self.tracer.note_attribute(self._tensor, name)  # type: ignore[attr-defined]
        return hasattr(self._tensor, name)

    shape = property(lambda self: self._tensor.shape)
    ndim = property(lambda self: self._tensor.ndim)

    @property
    def requires_grad(self) -> Any:
        if any(user.target == "requires_grad_" for user in self.node.users):
            return ValueProxy.__getattr__(self, "requires_grad")  # forward sets it
        self.tracer.note_attribute(self._tensor, "requires_grad")  # type: ignore[attr-defined]
        return self._tensor.requires_grad

    @property
    def grad_fn(self) -> Any:
        """None of a parameter, of which `register_parameter` of another module asks it."""
        if not isinstance(self._tensor, nn.Parameter):
            return ValueProxy.__getattr__(self, "grad_fn")
        self.tracer.note_attribute(self._tensor, "_is_param")  # type: ignore[attr-defined]
        return self._tensor.grad_fn

    def size(self, *dim: int) -> Any:
        return self._tensor.size(*dim)

    def dim(self) -> int:
        return int(self._tensor.dim())

    def numel(self) -> int:
        return int(self._tensor.numel())

    def __len__(self) -> int:
        return len(self._tensor)


@collections.abc.Sequence.register
class SequenceProxy(ValueProxy):
    """A shape, or a tuple that an op gives: `match x.shape: case (rows, _): ...` asks its class for that."""


class AttributeProxy(ValueProxy):
    """`x.name`: a method call when it is called, else a node; of what may be a method only when it is used."""

    def __init__(self, owner: fx.Proxy, name: str) -> None:
        self.__dict__.update(_owner=owner, _name=name, tracer=owner.tracer, _made=None)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._made is None:
            made = self.tracer.create_proxy("call_function", getattr, (self._owner, self._name), {})
            self.__dict__["_made"] = made.node
        return self._made  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name in ("item", "tolist"):
            read = questions_of(self).computed(self._owner.node, self._name, may_decide=False)
            if read is not UNKNOWN:
                return read
        return self.tracer.create_proxy("call_method", self._name, (self._owner, *args), kwargs)


def is_value(instance: Any) -> bool:
    """Whether this is a traced value, and no method of one."""
    if type(instance) is AttributeProxy:
        return not callable(getattr(torch.Tensor, instance._name, None))
    return type(instance) in (ValueProxy, WeightProxy, SequenceProxy)

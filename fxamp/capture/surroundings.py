"""What holds around a trace, and is as it was afterwards: modes, random state, Python's and torch's own questions.

Ctrl-C may come between any two lines, so nothing is switched before the `try` that switches it back.
"""

import builtins
import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import _symbolic_trace
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from fxamp.capture.guesses import known_or_guessed
from fxamp.capture.locations import asker, is_library_frame, user_line
from fxamp.capture.objects import is_other_self
from fxamp.capture.proxies import is_value, questions_of
from fxamp.capture.raises import check_of_torch, is_asked_for_nothing
from fxamp.dtypes import autocast_kind, device_of
from fxamp.errors import CaptureError
from fxamp.fakes import UNKNOWN
from fxamp.leaf_fakes import TWIN_OF
from fxamp.opnames import canonical_name
from fxamp.patched import patched
from fxamp.randomness import generator_states, moved_since, set_generators


def load_einops() -> None:
    """Let einops load what it loads at its first tensor, which would look like a write of the model's."""
    backends = sys.modules.get("einops._backends")
    if backends is not None:
        backends.get_backend(torch.empty(0, device="cpu"))


def fill_override_tables() -> None:
    """Let torch list its functions, which it does once in a process, before a trace puts others in their places."""
    torch.overrides.get_overridable_functions()
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)
    _device_constructors()  # for which a default device holds


@contextlib.contextmanager
def training_reads(root: nn.Module, reads: dict[str, bool]) -> Iterator[None]:
    """Record which modules' `training` flag is read (a property on nn.Module, for the length of the trace).

    What is recorded is the flag that a call begins with: forward may set it, read it, and put it back.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    before = {path: bool(module.__dict__.get("training")) for path, module in root.named_modules()}

    def read(module: nn.Module) -> bool:
        if "training" not in module.__dict__:
            raise AttributeError("training")  # then torch.jit's __getattr__ is asked, which knows it of its modules
        flag = bool(module.__dict__["training"])
        if (path := paths.get(id(module.__dict__.get(TWIN_OF, module)))) is not None:
            reads[path] = before[path]
        elif is_other_self(module, root):
            reads[""] = before[""]
        return flag

    def write(module: nn.Module, flag: bool) -> None:
        module.__dict__["training"] = flag

    def delete(module: nn.Module) -> None:
        del module.__dict__["training"]

    with patched((nn.Module, "training", property(read, write, delete))):
        yield


@contextlib.contextmanager
def grad_mode_reads(tracer: Any) -> Iterator[None]:
    """`torch.is_grad_enabled()` in the model answers for the call that is captured, and is noted.

    (The trace itself runs with gradients on, so that the model's own no_grad regions can be seen.)
    """
    original, outside = torch.is_grad_enabled, torch.is_grad_enabled()
    tracer.gradients_outside = outside
    original_inference = torch.is_inference_mode_enabled

    def is_asked_by_the_model() -> bool:
        return tracer.is_recording and not is_library_frame(asker(2))

    def is_grad_enabled() -> bool:
        if not is_asked_by_the_model():
            return original()
        tracer.grad_mode = outside
        return outside and original()

    def is_inference_mode_enabled() -> bool:
        if is_asked_by_the_model():
            raise CaptureError(f"{user_line()}: forward asks torch.is_inference_mode_enabled(). Ask is_grad_enabled().")
        return original_inference()

    with patched(
        (torch, "is_grad_enabled", is_grad_enabled), (torch, "is_inference_mode_enabled", is_inference_mode_enabled)
    ):
        yield


@contextlib.contextmanager
def honest_questions() -> Iterator[None]:
    """`isinstance(x, torch.Tensor)` and `callable(x)` in the model are as in eager; what cannot be told is refused.
    So is `isinstance(x, torch.fx.Proxy)`, or a FakeTensor, where a trace can be hidden.

    (A proxy whose `__class__` is Tensor would do for Python, but torch's C parser believes it too and crashes. Every
    fx.Proxy can be called.)
    """
    original, original_callable = builtins.isinstance, builtins.callable

    def isinstance_(instance: Any, kinds: Any) -> bool:
        asks_if_traced = kinds is fx.Proxy or kinds is FakeTensor
        if asks_if_traced and is_value(instance) and not is_library_frame(sys._getframe(1)):
            return is_asked_for_nothing() or not questions_of(instance).of_data.hides_trace()
        if original(instance, kinds):
            return True
        if not is_value(instance):
            return False
        value = known_or_guessed(instance.node)
        if value is UNKNOWN and instance.tracer.example is None:
            return issubclass(torch.Tensor, kinds)  # a preview takes for a tensor what it does not know
        if value is UNKNOWN and is_asked_by_the_model(sys._getframe(1)):
            raise questions_of(instance).unfollowable("isinstance() of a value whose sizes depend on data", data=True)
        return value is not UNKNOWN and original(value, kinds)

    def is_asked_by_the_model(frame: types.FrameType) -> bool:
        asker = frame.f_back if frame.f_code is torch.is_tensor.__code__ else frame
        return asker is not None and not is_library_frame(asker)

    def callable_(value: Any) -> bool:
        return not is_value(value) and original_callable(value)

    with patched((builtins, "isinstance", isinstance_), (builtins, "callable", callable_)):
        yield


@contextlib.contextmanager
def plain_answers(tracer: Any) -> Iterator[None]:
    """`torch.finfo(x.dtype)`, `torch.set_default_dtype(x.dtype)` and `torch._check(x.shape[0] == 4)` are as in eager.

    torch's own take no traced dtype and no traced flag.
    """
    originals = {name: getattr(torch, name) for name in ("finfo", "iinfo", "set_default_dtype", "_check_with")}

    def asking(name: str, original: Any) -> Callable[..., Any]:
        def answer(*given: Any, **kwargs: Any) -> Any:
            told = [tracer.questions.decide(each, name) if issubclass(type(each), fx.Proxy) else each for each in given]
            return original(*told, **kwargs)

        return answer

    def check_with(error: type[Exception], answer: Any, message: Callable[[], Any] | None = None) -> None:
        messages = tracer.questions.messages
        if issubclass(type(answer), fx.Proxy):
            answer = tracer.questions.decide(
                answer, "_check", lambda: check_of_torch(error, message and messages.heard(message))
            )
        if messages.are_unsaid and message is not None:
            message = messages.heard(message)
        originals["_check_with"](error, answer, message)

    instead = {name: asking(name, original) for name, original in originals.items()} | {"_check_with": check_with}
    with patched(*((torch, name, answer) for name, answer in instead.items())):
        yield


@contextlib.contextmanager
def unrepeatable_randomness() -> Iterator[None]:
    """Raise where forward drew a random number that the graph would freeze; leave the generators as they were."""
    with contextlib.ExitStack() as stack:
        for holder, name in _RNG_STATE:
            stack.enter_context(_refused(holder, name))
        with _unchanged_randomness():
            yield


# What reads or sets the state of a generator: the graph draws, and would not do that.
_RNG_STATE = [
    (holder, name)
    for holder in (torch, torch.random)
    for name in ("get_rng_state", "set_rng_state", "fork_rng")
    if hasattr(holder, name)
]


@contextlib.contextmanager
def _refused(holder: Any, name: str) -> Iterator[None]:
    """Raise where the model calls it; torch's own calls go through."""
    original, thread = getattr(holder, name), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not is_library_frame(sys._getframe(1)):
            raise CaptureError(
                f"{user_line()}: forward calls torch.{name}, which a graph cannot hold: it draws at each call."
            )
        return original(*args, **kwargs)

    with patched((holder, name, call)):
        yield


@contextlib.contextmanager
def _unchanged_randomness() -> Iterator[None]:
    before = generator_states()
    try:
        yield
        moved = moved_since(before)
        if "numpy" in moved:
            raise CaptureError(
                "forward draws from numpy.random, which a graph would freeze to one value. Use torch's random "
                "functions, or draw the number outside and pass it in."
            )
        if "python" in moved:
            raise CaptureError(
                "forward draws from Python's random module, which a graph would freeze to one value. "
                "Use torch's random functions, or draw the number outside and pass it in."
            )
        if "cpu" in moved:
            raise CaptureError(
                "forward draws torch random numbers that do not depend on its inputs in a way a graph cannot repeat"
            )
    finally:
        set_generators(before)


def autocast_device(root: nn.Module) -> str:
    """The type of device whose autocast regions in forward are seen; on the meta device torch has no autocast."""
    return autocast_kind(device_of(root))


@contextlib.contextmanager
def idle_autocast(device_type: str) -> Iterator[None]:
    """Autocast that is on but casts nothing, so that regions where the user switches it off can be seen."""
    was, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    try:
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, torch.float32)
        yield
    finally:
        torch.set_autocast_enabled(device_type, was)
        torch.set_autocast_dtype(device_type, dtype)


@contextlib.contextmanager
def compiled_functions_opened() -> Iterator[None]:
    """A function that the user has compiled is the Python behind it, and no error, where it is traced."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import: nothing has been compiled
        yield
        return
    revert = torch._dynamo.config._make_closure_patcher(error_on_nested_fx_trace=False)()
    try:
        yield
    finally:
        revert()


@contextlib.contextmanager
def scripted_functions_opened() -> Iterator[None]:
    """A function of `torch.jit.script`, which takes no proxies, is the Python that it was made of, as for Dynamo."""
    kind: Any = torch.jit.ScriptFunction
    original = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        is_traced = any(issubclass(type(value), fx.Proxy) for value in pytree.tree_leaves((args, kwargs)))
        written = getattr(function, "_torchdynamo_inline", None) if is_traced else None
        return original(function, *args, **kwargs) if written is None else written(*args, **kwargs)

    with patched((kind, "__call__", call)):
        yield


# torch functions whose questions about values only guard a `raise`: the kernels behind them check again.
_CHECKS = frozenset(
    {rnn.pad_packed_sequence.__code__, rnn._packed_sequence_init_args.__code__, nn.Transformer.forward.__code__}
)


def asked_by_torch_check() -> bool:
    """Whether the Python question being answered is one of torch's own argument checks."""
    frame: Any = sys._getframe(1)
    while frame is not None and ("/fxamp/" in frame.f_code.co_filename or "/torch/fx/" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_code in _CHECKS


@contextlib.contextmanager
def opened_wraps(keep: Callable[[str], bool]) -> Iterator[bool]:
    """Trace into the functions that somebody gave to `torch.fx.wrap`, all but those `keep` names.

    Libraries wrap functions whose control flow a tracer without values cannot follow (torchvision's window
    attention); whole, their GEMMs would stay in float32.

    Yields:
        whether any function was opened.
    """
    registry = _symbolic_trace._wrapped_fns_to_patch
    saved = dict(registry)
    try:
        for key, namespace in saved.items():
            if not keep(canonical_name(namespace.get(key[1]))):
                del registry[key]
        yield len(registry) < len(saved)
    finally:
        registry.clear()
        registry.update(saved)

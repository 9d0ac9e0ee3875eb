"""Run something for a look only: the modes and hooks of the call that it is found out for see nothing of it."""

import contextlib
from collections.abc import Iterator

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from fxamp.function_modes import no_export


@contextlib.contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """The user's hooks on saved tensors see the model's own tensors, and none of a capture."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def no_inference_mode() -> Iterator[None]:
    """A call in inference mode gets the graph that it would get under no_grad."""
    grad_mode = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode):
        yield


@contextlib.contextmanager
def no_jit_trace() -> Iterator[None]:
    """torch.jit.trace records the graph that is made, and none of its making, whose sizes would be tensors."""
    state = torch._C._get_tracing_state()
    try:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


@contextlib.contextmanager
def outside_of_the_call() -> Iterator[None]:
    """The modes and hooks that a call is made under see nothing of what is found out for it.

    torch.export calls a model under modes of its own, and checkpoint under hooks that count what is saved.
    """
    if _is_plain():  # which costs an eighth of the rest
        yield
        return
    with _disable_current_modes(), no_export(), no_saved_tensor_hooks(), no_jit_trace(), no_inference_mode():
        yield


def _is_plain() -> bool:
    """Whether a call is made under none of these."""
    has_modes = torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    is_watched = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not (has_modes or is_watched or torch._C._get_tracing_state() or torch.is_inference_mode_enabled())

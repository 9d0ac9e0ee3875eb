"""When our own autograd functions step aside for plain torch calls."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

# Other classes (DTensor, a user's subclass) say themselves what a cast is, tensor by tensor.
_PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter, FakeTensor})


def must_be_plain(*tensors: torch.Tensor) -> bool:
    """While torch.compile, torch.export or torch.jit trace (Inductor fuses plain casts), under functorch transforms
    and forward-mode AD, and for tensor subclasses."""
    return (
        torch.compiler.is_compiling()
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None  # torch.jit.trace, and the ONNX exporter built on it
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN_TENSORS.issuperset(map(type, tensors))
    )

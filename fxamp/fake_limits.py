"""What fake tensors cannot do, told from a mistake in the model by the error that it ends in."""

from typing import Any


def is_a_limit(error: Exception) -> bool:
    """Whether an error tells what fake tensors cannot do, rather than a mistake in the model."""
    text = str(error)
    kind = type(error).__module__
    return (
        "fake_tensor" in kind
        or "_subclasses" in kind
        or "symbolic_shapes" in kind
        or isinstance(error, NotImplementedError)
        or "FakeTensor" in text
        or "fake modes" in text
        or "meta tensor" in text
        or "Meta" in text
        or "data-dependent" in text
        or "data is not allocated" in text
        or ("dtype" in text and _is_raised_by_meta(error))
    )


def is_foreign(target: Any) -> bool:
    """Whether a node's target is not torch's: what it raises on fake tensors tells nothing about the model."""
    if isinstance(target, str):
        return False
    if isinstance(getattr(target, "__self__", None), type):  # `apply` of a custom autograd.Function
        return is_foreign(target.__self__)
    module = str(getattr(target, "__module__", "torch") or "torch")
    return module.partition(".")[0] not in ("torch", "_operator", "builtins")


def _is_raised_by_meta(error: Exception) -> bool:
    """Whether a meta kernel refused: about dtypes some are stricter than the real kernels (`_grouped_mm`)."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith("_meta_registrations.py"):
            return True
        trace = trace.tb_next
    return False

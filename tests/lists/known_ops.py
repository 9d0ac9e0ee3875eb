"""The ops that torch itself enumerates: its op database and autocast's registrations."""

import functools
import itertools
import sys
import types
import unittest.mock
from concurrent.futures import ThreadPoolExecutor

import torch

from fxamp.opnames import canonical_name

SINCE = {"rms_norm": "2.12", "const_data_ptr": "2.13", "linalg_matrix_sqrth": "2.14", "linalg_polar": "2.14"}
"""What the lists name that the oldest torch lacks: a policy of autocast's, a method of Tensor, ops."""
UNTIL = {"cholesky": "2.14", "qr": "2.14"}
"""What autocast's tables name that the newest torch has no more as an op of ATen."""
ONLY_IN_LATER = {name for name, version in SINCE.items() if torch.__version__ < version}
ONLY_IN_EARLIER = {name for name, version in UNTIL.items() if torch.__version__ >= version}

USERS_KERNELS = "jiterator"
"""Entries of op_db that are kernels written by a test, not ops of torch."""


@functools.cache
def op_infos():
    """`op_db` for float32, without kernels that exist only in torch's tests."""
    if "expecttest" not in sys.modules:
        # torch.testing imports it for a base class of its own tests, which nothing here runs.
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    # Importing it forbids all later tests to set torch.backends' flags.
    with unittest.mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db

    floating = (info for info in op_db if any(dtype.is_floating_point for dtype in info.dtypes))
    return [info for info in floating if not info.name.startswith(USERS_KERNELS)]


def op_of(info) -> str:
    """Canonical op of an entry: nn.functional.gelu -> "gelu", linalg.inv -> "linalg_inv", T -> "getattr"."""
    name = info.name.removeprefix("torch.ops.aten.").removesuffix(".default")
    name = name.removeprefix("torch.").removeprefix("nn.functional.").replace(".", "_")
    if isinstance(getattr(torch.Tensor, name, None), types.GetSetDescriptorType) and not hasattr(torch, name):
        return "getattr"
    return canonical_name(name)


def float32_samples(info, count: int) -> list[tuple]:
    """The first `count` samples, as (input, args, kwargs).

    Torch's generators reseed and inspect the call stack for each tensor, so they run where it is short.
    """
    with ThreadPoolExecutor(1) as short_stack:
        return short_stack.submit(_float32_samples, info, count).result()


def _float32_samples(info, count: int) -> list[tuple]:
    samples = itertools.islice(info.sample_inputs("cpu", torch.float32), count)
    return [(sample.input, sample.args, sample.kwargs) for sample in samples]


def autocast_registrations(key: str) -> set[str]:
    """Names of the ops with a kernel for that dispatch key, overloads included: {"norm.Scalar", ...}."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if not name.startswith("fxamp_tests::")}


def in_dtype(value, dtype: torch.dtype):
    """The same arguments with every float32 tensor converted, also inside lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype == torch.float32 else value
    if isinstance(value, dict):
        return {key: in_dtype(item, dtype) for key, item in value.items()}
    return type(value)(in_dtype(item, dtype) for item in value) if type(value) in (list, tuple) else value

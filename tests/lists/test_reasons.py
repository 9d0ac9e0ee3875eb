"""The numbers that reasons state, computed."""

import pytest
import torch
import torch.nn.functional as F
from known_ops import op_infos, op_of

from fxamp.lists import OpLists

LISTS = OpLists.default()
HALF, BFLOAT = torch.float16, torch.bfloat16


def half(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=HALF)


def ones_added(op: str, dtype: torch.dtype) -> float:
    index, ones = torch.zeros(4096, dtype=torch.long), torch.ones(4096, dtype=dtype)
    return getattr(torch.zeros(1, dtype=dtype), op)(0, index, ones).item()


def counts_kept(dtype: torch.dtype, count: int) -> bool:
    return torch.tensor(float(count), dtype=dtype).item() == count


def grid_step_in_pixels(dtype: torch.dtype, width: int) -> float:
    """Distance of neighbouring coordinates just below 1, in pixels of an axis from -1 to 1."""
    return torch.finfo(dtype).eps / 2 / (2 / width)


def draws_a_zero(dtype: torch.dtype) -> float:
    return 2**20 / (torch.rand(2**20, dtype=dtype) == 0).sum().item()


DRAWS_A_ZERO = 256 if torch.__version__ < "2.12" else 512
"""Draws of a bfloat16 uniform for one that is 0."""

FACTS = {
    ("exp", "11.09"): lambda: half(11.08).exp().isfinite() and half(11.1).exp().isinf(),
    ("exp2", "x = 16"): lambda: half(16).exp2().isinf() and half(15.99).exp2().isfinite(),
    ("cosh", "11.78"): lambda: half(11.77).cosh().isfinite() and half(11.8).cosh().isinf(),
    ("reciprocal", "1.5e-5"): lambda: half(1.5e-5).reciprocal().isinf() and half(1.54e-5).reciprocal().isfinite(),
    ("rsqrt", "3e-8"): lambda: half(2.9e-8) == 0 and half(3.1e-8) > 0,
    ("pow", "256**2"): lambda: half(256).pow(2).isinf() and half(2**-13).pow(2) == 0,
    ("ldexp", "n = 16"): lambda: torch.ldexp(half(1), torch.tensor(16)).isinf(),
    ("norm", "256 squared"): lambda: (half(256) * half(256)).isinf(),
    ("nanmean", "1000 values of 1000"): lambda: torch.full((1000,), 1000.0, dtype=HALF).nanmean().isinf(),
    ("mean", "range of its input"): lambda: torch.full((1000,), 1000.0, dtype=HALF).mean() == 1000,
    ("dot", "10 by 10"): lambda: torch.full((1000,), 10.0, dtype=HALF).square().float().sum() > 65504,
    ("index_add", "2048 in fp16"): lambda: ones_added("index_add", HALF) == 2048,
    ("index_add", "256 in bfloat16"): lambda: ones_added("index_add", BFLOAT) == 256,
    ("arange", "2048"): lambda: counts_kept(HALF, 2047) and not counts_kept(HALF, 2049),
    ("arange", "256"): lambda: counts_kept(BFLOAT, 255) and not counts_kept(BFLOAT, 257),
    ("sin", "0.25"): lambda: abs(half(1000.25).item() - 1000.25) == 0.25,
    ("isclose", "1e-8"): lambda: half(1e-8) == 0,
    ("nextafter", "8192"): lambda: torch.finfo(HALF).eps / torch.finfo(torch.float32).eps == 8192,
    ("grid_sample", "width 2048"): lambda: grid_step_in_pixels(HALF, 2048) == 0.5,
    ("grid_sample", "width 256"): lambda: grid_step_in_pixels(BFLOAT, 256) == 0.5,
    ("rand_like", "once in 512"): lambda: DRAWS_A_ZERO / 2 < draws_a_zero(BFLOAT) < 2 * DRAWS_A_ZERO,
    ("erfc", "bounded by 2"): lambda: half(-9).erfc() == 2,
    ("softplus", "0.7"): lambda: 0 < F.softplus(torch.zeros(())).item() < 0.7,
    ("sqrt", "always in range"): lambda: half(6e-8, 65504).sqrt().ge(2e-4).all() and half(65504).sqrt() < 256,
}


@pytest.mark.parametrize(("op", "stated"), FACTS)
def test_fact(op, stated):
    assert stated in LISTS.row(op).reason
    assert FACTS[op, stated]()


def test_ops_said_to_have_no_low_kernel_have_none():
    stated = ("no low kernel", "without low kernels")
    infos = [info for info in op_infos() if any(text in LISTS.row(op_of(info)).reason for text in stated)]
    checked = [info for info in infos if LISTS[op_of(info)] == "deny"]
    assert len(checked) > 80
    assert {info.name for info in checked if {HALF, BFLOAT} <= info.dtypes} == set()

"""Modes that forward switches for a part of itself hold for that part in the converted model."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.switches import set_switches, switches_found

BOTH = pytest.mark.parametrize("capture", ["symbolic", "dynamo"])


class Noting(TorchDispatchMode):
    """What is switched on while GEMMs run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::addmm", "aten::bmm"):
            self.seen.append((func._schema.name, dict(switches_found())))
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.one, self.two, self.run = nn.Linear(8, 8), nn.Linear(8, 8), forward

    def forward(self, x):
        return self.run(self, x)


@contextlib.contextmanager
def deterministic():
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was)


@contextlib.contextmanager
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def attended(x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def with_sdpa(m, x):
    with sdpa_kernel(SDPBackend.MATH):
        y = attended(m.one(x))
    return m.two(y)


def nested(m, x):
    with torch.backends.cudnn.flags(enabled=False):
        x = m.one(x)
        with deterministic():
            x = m.two(x)
        x = m.one(x)
    return m.two(x)


def left_on(m, x):
    with deterministic(), torch.backends.mkldnn.flags(enabled=False):
        return m.two(m.one(x))


FORWARDS = {"attention": with_sdpa, "nested": nested, "to the end": left_on}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_each_gemm_runs_under_the_switches_of_its_place(forward):
    model, x, seen = Model(forward), torch.randn(3, 8), []
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
    before = switches_found()
    for run in (model, converted):
        with Noting() as noting:
            run(x)
        seen.append(noting.seen)
        assert switches_found() == before
    assert seen[0] == seen[1] and len({str(flags) for _, flags in seen[0]}) > (forward is not left_on)
    assert not [row.name for row in fxamp.report(converted).rows if row.colour == "unlisted"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_switches_inside_of_checkpointed_blocks(use_reentrant):
    """Each block is recomputed by itself, under its own switches."""

    def forward(m, x):
        for _ in range(2):
            x = checkpoint(with_sdpa, m, x, use_reentrant=use_reentrant)
        return x

    model, x, seen, slopes = Model(forward), torch.randn(3, 8, requires_grad=True), [], []
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
    for run in (model, converted):
        model.zero_grad()
        with Noting() as noting:
            run(x).sum().backward()
        seen.append([flags for name, flags in noting.seen if name == "aten::addmm"])
        slopes.append([parameter.grad for parameter in model.parameters()])
    assert seen[0] == seen[1]
    assert len(seen[0]) == (8 if use_reentrant else 6)  # two layers in two blocks; the other way leaves the last out
    for ours, expected in zip(slopes[1], slopes[0], strict=True):
        assert (ours - expected).norm() <= 0.05 * expected.norm()


def test_what_the_caller_has_switched_stays():
    converted = fxamp.convert(Model(nested), torch.bfloat16, example_inputs=(torch.ones(3, 8),), capture="symbolic")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), Noting() as noting:
        converted(torch.ones(3, 8))
        assert not torch.backends.cuda.math_sdp_enabled()
    assert all(flags["flash_sdp"] and not flags["math_sdp"] for _, flags in noting.seen)
    assert [flags["cudnn"] for _, flags in noting.seen] == [False, False, False, True]


def test_kernels_that_a_model_asks_for_hold_under_a_caller_that_asks_for_others():
    """Only flash is switched off by the model; that math is on is what it asks for, too."""
    model, x = Model(with_sdpa), torch.randn(3, 8)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.testing.assert_close(converted(x), model(x), rtol=0.05, atol=0.05)


def test_kernels_that_are_on_at_the_conversion_are_on_later():
    model, x, seen = Model(with_sdpa), torch.randn(3, 8), []
    with sdpa_kernel(SDPBackend.MATH):
        converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
        assert not torch.backends.cuda.flash_sdp_enabled()
    for run in (model, converted):
        with Noting() as noting:
            run(x)
        seen.append(noting.seen)
    assert seen[0] == seen[1] and not all(flags["flash_sdp"] for _, flags in seen[1])


@BOTH
@pytest.mark.parametrize("is_given", [True, False])
def test_a_switch_that_forward_leaves_on_is_on_after_a_call_and_not_after_a_conversion(is_given, capture):
    def forward(m, x):
        torch.backends.cuda.enable_flash_sdp(False)
        return attended(m.one(x))

    before = switches_found()
    converted = fxamp.convert(
        Model(forward), torch.bfloat16, example_inputs=(torch.ones(3, 8),) if is_given else None, capture=capture
    )
    assert switches_found() == before
    try:
        for _ in range(2):
            converted(torch.ones(3, 8))
            assert not torch.backends.cuda.flash_sdp_enabled()
            set_switches(before)
    finally:
        set_switches(before)


def test_a_conversion_that_fails_leaves_no_switch_changed():
    def forward(m, x):
        torch.set_default_dtype(torch.float64)
        raise ValueError("no")

    with pytest.raises(fxamp.errors.CaptureError, match="ValueError: no"):
        fxamp.convert(Model(forward), torch.bfloat16, example_inputs=(torch.ones(3, 8),), capture="symbolic")
    assert torch.get_default_dtype() == torch.float32


def test_an_error_inside_leaves_no_switch_behind():
    def fails(m, x):
        with deterministic(), torch.no_grad():
            y = m.one(x)
            torch._assert(y.abs().sum() < 1e6, "too much")
        return m.two(y)

    converted = fxamp.convert(Model(fails), torch.bfloat16, example_inputs=(torch.ones(3, 8),), capture="symbolic")
    before = switches_found()
    with pytest.raises((AssertionError, RuntimeError), match="too much"):
        converted(torch.full((3, 8), 1e9))
    assert switches_found() == before and torch.is_grad_enabled()


def test_tensors_made_under_another_default_dtype_have_it():
    def forward(m, x):
        with double():
            scale = torch.ones(8)
        return m.one(x) * scale

    model, x = Model(forward), torch.randn(3, 8)
    assert model(x).dtype == torch.float64
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic", output_dtype=None)
    assert converted(x).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


@BOTH
def test_attention_that_is_asked_for_its_math_form_has_second_derivatives(capture):
    torch.manual_seed(0)
    model, x = Model(with_sdpa), torch.randn(3, 8, requires_grad=True)
    converted = fxamp.convert(model, torch.bfloat16, capture=capture)
    found = []
    for run in (model, converted):
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        model.zero_grad()
        slope.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(found[0]) == len(found[1]) >= 3
    for ours, expected in zip(found[1], found[0], strict=True):
        assert (ours - expected).norm() <= 0.05 * expected.norm()


def test_what_runs_under_inference_mode_gets_no_gradients():
    def forward(m, x):
        with torch.inference_mode():
            h = m.one(x)
        return m.two(x) + h.clone() + m.one.weight.detach().sum()

    model = Model(forward)
    converted = fxamp.convert(model, torch.bfloat16)
    x = torch.randn(3, 8)
    converted(x).sum().backward()
    assert model.one.weight.grad is None and model.two.weight.grad is not None
    torch.testing.assert_close(converted(x), model(x), rtol=0.02, atol=0.05)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert fxamp.report(converted).low_precision_nodes


@pytest.mark.parametrize("flag", [True, False])
def test_gradients_that_an_inputs_flag_switches(flag):
    def forward(m, x):
        with torch.set_grad_enabled(x.requires_grad):
            h = m.one(x)
        return m.two(h)

    model = Model(forward)
    converted = fxamp.convert(model, torch.bfloat16)
    for requires_grad in (flag, not flag):
        model.zero_grad()
        converted(torch.randn(3, 8, requires_grad=requires_grad)).sum().backward()
        assert (model.one.weight.grad is not None) == requires_grad
        assert model.two.weight.grad is not None


def test_switches_are_set_one_by_one():
    found = switches_found()
    set_switches((("cudnn_benchmark", True),))
    try:
        assert dict(switches_found()) == {**dict(found), "cudnn_benchmark": True}
    finally:
        set_switches(found)
    assert switches_found() == found

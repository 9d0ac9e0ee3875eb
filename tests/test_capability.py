"""What a device is asked about its kernels, and what follows for a recurrent layer."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.capability import _RECURRENT, is_fused_recurrent, ops_of_recurrent
from fxamp.dtypes import resolve_dtype
from fxamp.runtime.recurrent_memory import GATES

X = torch.randn(2, 4, 8)


class Net(nn.Module):
    def __init__(self, cell=nn.LSTM):
        super().__init__()
        self.cell, self.head = cell(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.cell(x)[0])


@pytest.fixture
def without_kernel(monkeypatch):
    """As if this device had a kernel for float32 alone."""
    asked = []

    def answer(op, dtype, device):
        asked.append(op)
        return dtype == torch.float32

    monkeypatch.setattr("fxamp.passes.rules.is_fused_recurrent", answer)
    return asked


def precisions(**options):
    report = fxamp.report(fxamp.convert(Net(), example_inputs=(X,), dtype=torch.bfloat16, **options))
    return {row.op: row.precision for row in report.rows}


def test_every_recurrent_op_can_be_asked_about():
    assert set(_RECURRENT) == set(GATES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", _RECURRENT)
def test_the_question_is_a_layer_that_runs(op, dtype):
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        found = ops_of_recurrent(op, dtype, "cpu")
    assert not found.isdisjoint(("mkldnn_rnn_layer", "addmm", "sigmoid", "tanh", "relu"))
    assert is_fused_recurrent(op, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks cuDNN, which needs a GPU")
@pytest.mark.parametrize("op", _RECURRENT)
def test_cudnn_has_a_kernel_for_float16(op):
    assert is_fused_recurrent(op, torch.float32, "cuda") and is_fused_recurrent(op, torch.float16, "cuda")


def test_a_layer_that_would_run_step_by_step_stays_high(without_kernel):
    found = precisions()
    assert (found["lstm"], found["linear"]) == ("high", "low") and without_kernel


def test_its_explanation_says_what_would_run_it_low(without_kernel):
    model = fxamp.convert(Net(), example_inputs=(X,), dtype=torch.bfloat16)
    text = str(fxamp.explain(model, "lstm"))
    assert "one kernel for it in float32, none in bfloat16" in text and "dtype=torch.float16" in text


@pytest.mark.parametrize("options", [{"overrides": {"cell": "allow"}}, {"opt_level": "O3"}])
def test_the_user_is_stronger(options, without_kernel):
    assert precisions(**options)["lstm"] == "low"


def test_so_is_the_users_list(without_kernel, monkeypatch):
    monkeypatch.setenv("FXAMP_ALLOWLIST_ADD", "lstm")
    assert precisions()["lstm"] == "low"


def test_weights_that_it_reads_stay_float32_at_o2(without_kernel):
    model = fxamp.convert(Net(), example_inputs=(X,), dtype=torch.bfloat16, opt_level="O2")
    assert {parameter.dtype for parameter in model.cell.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in model.head.parameters()} == {torch.bfloat16}


def test_where_float32_has_none_either_it_is_low(monkeypatch):
    monkeypatch.setattr("fxamp.passes.rules.is_fused_recurrent", lambda op, dtype, device: False)
    assert precisions()["lstm"] == "low"


@pytest.mark.parametrize(("place", "dtype"), [("cuda:0", torch.bfloat16), ("cuda:1", torch.float16)])
def test_bfloat16_is_a_matter_of_the_models_own_gpu(place, dtype, monkeypatch):
    """torch tells of the current one; an older one beside it only emulates bfloat16."""

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device.index)

        def __exit__(self, *_):
            current.pop()

    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: current[-1] == 0)
    assert resolve_dtype("auto", torch.device(place)) == dtype and current == [0]


def test_without_a_gpu_nothing_is_asked_of_it():
    if not torch.cuda.is_available():
        assert resolve_dtype("auto", torch.device("cuda", 0)) == torch.float16

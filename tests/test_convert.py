"""convert(): what it refuses, and that a refusal leaves the model as it was."""

import copy
import warnings

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import CaptureError, OpListError, OptionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.head(self.body(x)) * scale


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.fc(x)
        return x


def state(model: nn.Module) -> dict[str, object]:
    return {"dict": dict(model.__dict__), "tensors": {k: v.clone() for k, v in model.state_dict().items()}}


@pytest.mark.parametrize(
    ("given", "culprit"),
    [
        (lambda: "a string", "str"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "scripted"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "DataParallel"),
        (lambda: nn.ReLU(), "no floating-point parameters"),
    ],
)
def test_what_is_no_convertible_model_is_refused(given, culprit):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = given()
    with pytest.raises(OptionError, match=culprit):
        fxamp.convert(model)


def test_a_ddp_wrapped_model_is_refused_with_the_order_to_use():
    class FakeDDP(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.module = nn.Linear(2, 2)

    with pytest.raises(OptionError, match=r"Convert first and wrap after: FakeDDP\(fxamp.convert\(model\)\)"):
        fxamp.convert(FakeDDP())


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"dtype": torch.float64}, "torch.float64"),
        ({"dtype": "fp16"}, "'fp16'"),
        ({"opt_level": "O4"}, "'O4'.*O0, O1, O2, O3"),
        ({"opt_level": "01"}, "'01' starts with a zero"),
        ({"level": "balance"}, "'balance'.*Did you mean 'balanced'"),
        ({"pad_to": -8}, "pad_to=-8"),
        ({"pad_to": 2.5}, "pad_to=2.5"),
        ({"pad_to": True}, "pad_to=True"),
        ({"pad": "never"}, "'never'"),
        ({"capture": "trace"}, "'trace'"),
        ({"lists": {"exp": "deny"}}, "lists is a dict"),
        ({"overrides": ["head"]}, "overrides is a list"),
        ({"overrides": {"head": "fp32"}}, r"overrides\['head'\]='fp32'"),
        ({"overrides": {"haed": "deny"}}, "'haed' matches no module and no node. Did you mean 'head'"),
        ({"output_dtype": torch.int64}, "torch.int64"),
        ({"example_inputs": 3}, "example_inputs=int"),
        ({"example_inputs": ()}, r"do not fit Net.forward.*missing a required argument: 'x'"),
        ({"example_inputs": (torch.zeros(2, 4), 1.0, 2)}, "do not fit Net.forward.*too many positional"),
        ({"example_inputs": ((torch.zeros(2, 4),), {"scael": 1.0})}, "unexpected keyword argument 'scael'"),
        ({"example_inputs": (torch.zeros(2, 5),)}, "the model fails in linear"),
    ],
)
def test_a_wrong_option_is_named_and_the_model_unchanged(arguments, culprit):
    model = Net()
    before = state(model)
    with pytest.raises(OptionError, match=culprit):
        fxamp.convert(model, **arguments)
    after = state(model)
    assert after["dict"] == before["dict"]
    assert all(torch.equal(value, after["tensors"][name]) for name, value in before["tensors"].items())


@pytest.mark.parametrize("example", [None, (torch.ones(2, 4),)])
def test_control_flow_on_data_names_its_line_and_a_way_out(example):
    model = Branching()
    with pytest.raises(CaptureError, match=r"test_convert.py:\d+.*bool\(\) of a traced value.*(Pass|torch.where)"):
        fxamp.convert(model, example_inputs=example, capture="symbolic")
    assert type(model) is Branching
    assert model(torch.ones(1, 4)).shape == (1, 4)


def test_conversion_inside_autocast_is_refused():
    with torch.autocast("cpu"), pytest.raises(OptionError, match=r"inside torch.autocast\('cpu'\)"):
        fxamp.convert(Net())


def test_a_malformed_list_file_names_file_and_key(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[denny]\nexp = "no"\n')
    with pytest.raises(OpListError, match=r"mine.toml.*denny"):
        fxamp.OpLists.from_toml(path)


def test_disable_variable_returns_the_model_itself(monkeypatch):
    monkeypatch.setenv("FXAMP_DISABLE", "1")
    model = Net()
    assert fxamp.convert(model) is model


def test_o0_returns_the_model_itself():
    model = Net()
    assert fxamp.convert(model, opt_level="O0") is model


def test_converting_twice_returns_the_converted_model_as_it_is():
    converted = fxamp.convert(Net())
    assert fxamp.convert(converted) is converted


def test_summary_line_counts_nodes_casts_and_weights():
    converted = fxamp.convert(Net(), dtype=torch.float16, example_inputs=(torch.zeros(2, 4),))
    expected = "Converted 4/10 nodes to float16 precision using 1 cast(s) to float16 (excluding 4 weight casts)"
    assert fxamp.report(converted).summary() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16, None])
def test_outputs_come_in_the_dtype_asked_for(dtype, output_dtype):
    converted = fxamp.convert(Net(), dtype=dtype, output_dtype=output_dtype)
    assert converted(torch.randn(3, 4)).dtype == (output_dtype or dtype)


def test_float64_models_and_inputs_are_left_alone():
    model = copy.deepcopy(Net()).double()
    converted = fxamp.convert(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(converted(x), model(x))


@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_level_stays_near_fp32(level, dtype):
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(16, 4)
    converted = fxamp.convert(model, dtype=dtype, level=level)
    # three roundings to 8 (bf16) or 11 (fp16) bits of numbers below 2
    torch.testing.assert_close(converted(x), model(x), rtol=0, atol=6 * torch.finfo(dtype).eps)

"""convert(): what it refuses, and that a refusal leaves the model as it was."""

import copy
import sys
import warnings

import pytest
import torch
from torch import nn

import fxamp
from fxamp.dtypes import resolve_dtype
from fxamp.errors import CaptureError, InvariantError, OpListError, OptionError
from fxamp.model.engine import engine_of
from fxamp.options import warn_of_untested_torch


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
        if self.fc(x).sum() > 0:
            return self.fc(x)
        return x


def state(model: nn.Module) -> dict[str, object]:
    return {"dict": dict(model.__dict__), "tensors": {k: v.clone() for k, v in model.state_dict().items()}}


@pytest.mark.parametrize(
    ("given", "culprit"),
    [
        (lambda: "a string", "str"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "scripted"),
        (
            lambda: nn.DataParallel(nn.Linear(2, 2)),
            r"DataParallel, which copies .* at every call.*DistributedDataParallel\(fxamp.convert\(module\)\)",
        ),
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
        ({"dtype": "fp61"}, "'fp61' is not a low precision.*Did you mean 'fp16'"),
        ({"dtype": (torch.zeros(64),)}, r"^dtype= was given a tuple\. Inputs go into example_inputs=\.$"),
        ({"dtype": torch.zeros(64)}, r"^dtype= was given a Tensor\. Inputs go into example_inputs=\.$"),
        ({"dtype": "float32"}, "'float32' is not a low precision"),
        ({"opt_level": "o2"}, "'o2' is not allowed.*Did you mean 'O2'"),
        ({"opt_level": 2}, "opt_level=2 is not allowed"),
        ({"opt_level": ["O2"]}, "opt_level=.* is not allowed"),
        ({"level": "Balanced"}, "Did you mean 'balanced'"),
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
        ({"example_inputs": 3}, r"^example_inputs is a int\. Give a tensor"),
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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("float16", torch.float16),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("auto", torch.bfloat16),
    ],
)
def test_a_dtype_may_be_named(name, dtype):
    assert fxamp.report(fxamp.convert(Net(), dtype=name)).low_dtype == str(dtype).removeprefix("torch.")


class Protected(nn.Module):
    """Its author switches autocast off for a part; the layers stand in a module of their own."""

    def __init__(self, decides: bool):
        super().__init__()
        self.layers, self.decides = nn.Sequential(nn.Linear(8, 8)), decides

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = x.float()
        y = self.layers(x)
        return y * 2 if self.decides and not y.is_meta and y.sum() > 0 else y


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("options", [{"capture": "dynamo"}, {}, {"opt_level": "O2"}], ids=str)
def test_a_model_on_meta_with_autocast_of_its_own(options, decides):
    x = torch.empty(2, 8, device="meta")
    converted = fxamp.convert(Protected(decides).to("meta"), dtype=torch.bfloat16, example_inputs=(x,), **options)
    assert converted(x).dtype == torch.float32 and converted(x).is_meta


def test_without_a_dtype_a_model_on_meta_is_taken_as_on_a_cpu():
    assert fxamp.report(fxamp.convert(Net().to("meta"))).low_dtype == "bfloat16"


def test_a_device_that_autocast_does_not_know_needs_a_dtype():
    with pytest.raises(fxamp.OptionError, match=r"no default for vulkan devices.*dtype="):
        resolve_dtype(None, torch.device("vulkan"))


# ------------------------------------------------------------------------------------------- converted already


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bf16"},
        {"dtype": torch.float16, "level": "strict", "pad_to": None},
        {"dtype": "fp16", "overrides": {"head": "deny"}, "lists": fxamp.OpLists.default().override(deny=["gelu"])},
    ],
)
def test_converting_again_with_the_same_options_returns_the_converted_model(options):
    converted = fxamp.convert(Net(), **options)
    assert fxamp.convert(converted, **options) is converted
    assert fxamp.convert(converted) is converted


def test_example_inputs_complete_the_graph_of_a_converted_model():
    converted = fxamp.convert(Net(), dtype="fp16")
    assert fxamp.report(converted).is_preview
    assert fxamp.convert(converted, dtype="fp16", example_inputs=(torch.zeros(2, 4),)) is converted
    assert not fxamp.report(converted).is_preview


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bf16"}, "dtype=torch.bfloat16 instead of torch.float16"),
        ({"dtype": "fp16", "level": "strict"}, "level='strict' instead of 'balanced'"),
        ({"dtype": "fp16", "overrides": {"head": "deny"}}, "overrides={'head': 'deny'} instead of {}"),
        ({"dtype": "fp16", "output_dtype": None}, "output_dtype=None instead of torch.float32"),
    ],
)
def test_converting_again_with_other_options_starts_from_the_plain_model(options, said, caplog):
    model, x = Net(), torch.randn(3, 4)
    first = fxamp.convert(model, dtype="fp16")
    with caplog.at_level("INFO", "fxamp"):
        second = fxamp.convert(first, **options)
    direct = fxamp.convert(model, **options)
    assert second is not first and f"Net is converted again, with {said}" in caplog.text
    assert fxamp.report(second).summary() == fxamp.report(direct).summary()
    assert second(x).dtype == direct(x).dtype and torch.equal(second(x), direct(x))
    assert second.head.weight is model.head.weight
    assert torch.equal(first(x), fxamp.convert(model, dtype="fp16")(x))


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"opt_level": "O0"}, {"dtype": "bf16", "boundaries": "body"}])
def test_a_model_that_is_compiled_in_place_is_converted_again_from_the_plain_model(options):
    """`model.compile()` leaves a compiled call on the instance: that of the model as it was converted first."""
    model, x = Net(), torch.randn(3, 4)
    first = fxamp.convert(model, dtype="bf16")
    first.compile(backend="eager")
    expected = first(x)
    assert torch.equal(fxamp.convert(first, **options)(x), fxamp.convert(model, **options)(x))
    assert torch.equal(first(x), expected)
    torch._dynamo.reset()


def test_converting_again_at_o0_gives_the_plain_model():
    model, x = Net(), torch.randn(3, 4)
    plain = fxamp.convert(fxamp.convert(model), opt_level="O0")
    assert type(plain) is Net and torch.equal(plain(x), model(x))


def test_a_converted_model_with_other_options_stays_for_the_defaults_and_says_which(caplog):
    converted = fxamp.convert(Net(), dtype="fp16", level="strict")
    with caplog.at_level("INFO", "fxamp"):
        assert fxamp.convert(converted) is converted
    assert "converted already, with dtype=torch.float16, level='strict', and stays as it is" in caplog.text


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_lowered_parameters_cannot_be_converted_again(opt_level):
    x = torch.zeros(2, 4)
    converted = fxamp.convert(Net(), "bf16", (x,), opt_level)
    assert fxamp.convert(converted) is converted
    assert fxamp.convert(converted, "bf16", opt_level=opt_level) is converted
    with pytest.raises(OptionError, match=f"level='strict' instead of 'balanced': opt_level='{opt_level}' has lowered"):
        fxamp.convert(converted, "bf16", opt_level=opt_level, level="strict")
    with pytest.raises(OptionError, match=r"dtype=torch.float16 instead of torch.bfloat16.*built anew"):
        fxamp.convert(converted, "fp16", opt_level=opt_level)


@pytest.mark.parametrize("options", [{}, {"dtype": "fp16", "level": "strict"}, {"dtype": "bf16"}])
def test_boundaries_are_added_by_converting_again(options, caplog):
    """As the warning of modules with hooks asks for, which may have been set between two epochs."""
    model, x = Net(), torch.randn(3, 4)
    plain = fxamp.convert(model, "fp16", level="strict")
    with caplog.at_level("INFO", "fxamp"):
        again = fxamp.convert(plain, **options, boundaries="body")
    assert "stays as it is" not in caplog.text
    direct = fxamp.convert(model, **(options or {"dtype": "fp16", "level": "strict"}), boundaries="body")
    assert torch.equal(again(x), direct(x)) and again.head.weight is model.head.weight
    assert fxamp.report(again).summary() == fxamp.report(direct).summary()
    assert engine_of(again).options == engine_of(direct).options and list(engine_of(again).blocks) == ["body"]
    assert fxamp.convert(again) is again and plain(x).shape == again(x).shape


def test_boundaries_do_not_go_with_the_options_of_a_converted_model():
    converted = fxamp.convert(Net(), "bf16", (torch.zeros(2, 4),), "O2")
    with pytest.raises(OptionError, match="boundaries= goes with opt_level='O1' only, not with 'O2'"):
        fxamp.convert(converted, boundaries="body")


def test_boundaries_are_not_changed_by_converting_again():
    blocks = fxamp.convert(Net(), "fp16", boundaries="body")
    assert fxamp.convert(blocks) is blocks and fxamp.convert(blocks, "fp16", boundaries=("body",)) is blocks
    with pytest.raises(OptionError, match=r"with boundaries=\['body'\], .* another dtype\. Convert the original model"):
        fxamp.convert(blocks, "bf16")


# --------------------------------------------------------------------------------------- a call that does not fit


def test_a_call_of_another_shape_names_its_shapes_in_one_sentence(capfd):
    converted = fxamp.convert(Net())
    with pytest.raises(fxamp.InputError) as caught:
        converted(torch.zeros(2, 5))
    text = str(caught.value)
    assert "the model fails in linear when it is called with (float32 tensor of shape (2, 5)): " in text
    assert "test_convert.py" in text or "container.py" in text
    assert "example_inputs" not in text and ".." not in text and "\n" not in text
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert "Traceback" not in capfd.readouterr().err


def test_it_begins_with_the_model_where_no_line_of_it_is_the_users():
    with pytest.raises(fxamp.InputError, match=r"^the model fails in linear when"):
        fxamp.convert(nn.Sequential(nn.Linear(4, 4)))(torch.zeros(2, 5))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_loop_that_skips_batches_of_a_wrong_shape_skips_them(opt_level, is_first):
    """Converted or not, they are a RuntimeError."""
    model, converted = Net(), fxamp.convert(Net(), "bf16", (torch.zeros(2, 4),), opt_level=opt_level)
    for net in (model, converted):
        if not is_first:
            net(torch.zeros(2, 4))
        with pytest.raises(RuntimeError):
            net(torch.zeros(2, 5))
        with pytest.raises(RuntimeError):
            net(torch.zeros(2, 3, 2, 5))


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


class WritesItself(nn.Module):
    """In-place ops that an override moves out of place."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)

    def forward(self, x):
        y = torch.relu_(self.norm(self.convolution(x)))
        y *= 0.5
        return y.add_(1.0)


@pytest.mark.parametrize("name", ["relu_", "imul", "add_"])
@pytest.mark.parametrize("colour", ["allow", "deny"])
def test_an_override_of_a_node_that_writes_in_place_is_followed_under_its_name(name, colour):
    inputs = (torch.randn(2, 3, 8, 8),)
    model = WritesItself()
    strict = fxamp.convert(model, torch.float16, inputs, level="strict")
    assert name in {row.name for row in fxamp.report(strict).rows}
    ours = fxamp.convert(model, torch.float16, inputs, level="strict", overrides={name: colour})
    (row,) = [row for row in fxamp.report(ours).rows if row.name == name]
    assert row.precision == {"allow": "low", "deny": "high"}[colour]
    torch.testing.assert_close(ours(*inputs), model(*inputs), rtol=1e-2, atol=1e-2)


ODD_NAMES = ["a\nb", 'q"u', "it's", "a b", "class", "\\", "{x}", "<b>&", "self", "self._fxamp_place_0", "0"]


class OddNames(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ODD_NAMES:
            self.add_module(name.replace(".", "-"), nn.Linear(8, 8))
        self.register_parameter("w\nw", nn.Parameter(torch.ones(8)))
        self.register_buffer("b u\n", torch.ones(8))
        for number, name in enumerate(("lambda", "None", "we'ird \"x")):
            setattr(self, name, torch.full((8,), 1.0 + number))  # a plain attribute

    def forward(self, x):
        for module in self.children():
            x = module(x)
        for name in ("lambda", "None", "we'ird \"x"):
            x = x * getattr(self, name)
        return x * self._parameters["w\nw"] + self._buffers["b u\n"]


class NamedSelf(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if kind == "parameter":
            self.register_parameter("self", nn.Parameter(torch.full((8,), 2.0)))
        elif kind == "buffer":
            self.register_buffer("self", torch.full((8,), 2.0))
        else:
            self.self = torch.full((8,), 2.0)

    def forward(self, x):
        return {"self._fxamp_place_0": self.linear(x * self.self)}


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_a_tensor_may_be_called_self(kind):
    torch.manual_seed(0)
    model, x = NamedSelf(kind), torch.randn(2, 8)
    found = fxamp.convert(model, torch.float16, (x,))(x)
    torch.testing.assert_close(found, model(x), atol=5e-3, rtol=2e-3)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_modules_and_weights_may_have_any_name(opt_level, tmp_path):
    torch.manual_seed(0)
    model, x = OddNames(), torch.randn(2, 8)
    expected = model(x)
    converted = fxamp.convert(model, torch.float16, (x,), opt_level=opt_level)
    torch.testing.assert_close(converted(x), expected, atol=5e-3, rtol=0)
    fxamp.dump(converted, tmp_path)
    assert [row.module for row in fxamp.report(converted).rows if row.op == "linear"] == [*model._modules]
    plan = fxamp.report(converted).save_plan(tmp_path / "plan.json")
    again = fxamp.convert(OddNames(), torch.float16, (x,), opt_level=opt_level, plan=plan)
    assert again(x).shape == expected.shape


@pytest.mark.parametrize(
    ("version", "said"), [("2.10.1", True), ("2.11.0+cu130", False), ("2.13.0", False), ("2.14", True)]
)
def test_a_torch_that_was_not_tested_is_warned_about_once(version, said, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", version)
    warn_of_untested_torch.cache_clear()
    try:
        for _ in range(2):
            fxamp.convert(Net())
    finally:
        warn_of_untested_torch.cache_clear()
    assert [f"torch {version}" in text for text in caplog.messages].count(True) == int(said)


def test_a_rule_that_a_preview_breaks_is_warned_about(monkeypatch, caplog):
    def broken(*given):
        raise InvariantError("node y is low and float32")

    monkeypatch.setattr(sys.modules["fxamp.convert"], "build_variant", broken)
    fxamp.convert(Net())
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["the graph of Net breaks a rule of fxamp's own, please report it: node y is low and float32"]


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.texts = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images=None, texts=None, **more):
        images = None if images is None else self.images(images)
        texts = None if texts is None else self.texts(texts)
        return images, texts, self.scale.exp()


def test_a_model_that_may_be_given_nothing_has_no_preview(caplog):
    with caplog.at_level("INFO", logger="fxamp"):
        converted = fxamp.convert(Optional(), torch.bfloat16)
    assert [record.getMessage() for record in caplog.records] == [
        "no preview of Optional: what its forward takes has defaults; its first call makes its graph"
    ]
    converted(torch.randn(2, 4), torch.randn(2, 4))
    assert not fxamp.report(converted).outside


class Nothing(nn.Module):
    """A learned pattern, say of a grid of positions."""

    def __init__(self):
        super().__init__()
        self.seed, self.out = nn.Parameter(torch.randn(2, 4)), nn.Linear(4, 4)

    def forward(self):
        return self.out(self.seed)


def test_a_model_that_takes_nothing_has_one():
    report = fxamp.report(fxamp.convert(Nothing(), torch.bfloat16))
    assert [row.precision for row in report.rows if row.op == "linear"] == ["low"]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("key", ["layers", "model.layers", "model.layers.*"])
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_an_override_of_a_list_of_modules_reaches_what_it_holds(key, capture):
    x, is_inner = torch.randn(2, 4), key.startswith("model.")
    model = nn.Sequential()
    model.add_module("model", Layers())
    converted = fxamp.convert(
        model if is_inner else Layers(), torch.float16, (x,), capture=capture, overrides={key: "deny"}
    )
    converted(x)
    linears = [row for row in fxamp.report(converted).rows if row.op == "linear"]
    assert [row.precision for row in linears] == ["high", "high", "low"]

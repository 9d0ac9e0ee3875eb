"""What Dynamo leaves outside of every graph is said, once, and counted."""

import logging

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.errors import OptionError
from fxamp.review.uncaptured import _why
from tests.choosing import Choosing, batch

X = torch.linspace(-1, 1, 16).reshape(2, 8)


class Loop(nn.Module):
    """Dynamo gives up this frame: a graph break stands inside its loop."""

    def __init__(self, make=lambda: nn.Linear(8, 8)) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
            if x.sum().item() > 1e9:
                x = x * 2
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).relu()


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


class Helped(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            torch._dynamo.graph_break()
            x = part(helper(x))
        return x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.loop = Loop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loop(self.head(x))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("example_inputs", [None, (X,)])
def test_a_model_of_which_nothing_was_captured_says_so_once(example_inputs, caplog):
    model = Loop()
    converted = fxamp.convert(model, dtype="bf16", example_inputs=example_inputs, capture="dynamo")
    assert warnings_of(caplog) == []
    for _ in range(3):
        assert torch.equal(converted(X), model(X))
    (said,) = warnings_of(caplog)
    assert said.startswith("nothing of Loop was converted: 100% of the weights are read by no graph")
    assert "parts.0.weight" in said and "graph break inside a loop" in said
    report = fxamp.report(converted)
    assert not report.is_preview and len(report.outside) == 1 and "100% of the weights" in report.outside[0]
    assert "call the model once" not in str(report) and "preview" not in str(report)


def test_what_dynamo_leaves_out_runs_as_under_autocast_from_then_on(caplog):
    model = Loop()
    converted = fxamp.convert(model, dtype="bf16")
    with caplog.at_level(logging.INFO, "fxamp"):
        assert torch.equal(converted(X), model(X))
        assert warnings_of(caplog) == []
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(X).float()
        for _ in range(3):
            assert torch.equal(converted(X), expected)
    (said,) = warnings_of(caplog)
    assert said.startswith("nothing of Loop was converted: 100% of the weights are outside of every graph")
    assert "(parts.0.weight" in said and "in a forward that runs as under torch.autocast: " in said
    told = [text for text in caplog.messages if "as Dynamo's graphs hold 0% of the weights alone" in text]
    assert told == [
        "Loop: from now on runs as under torch.autocast, and what it calls as graphs, "
        "as Dynamo's graphs hold 0% of the weights alone"
    ]


class LoopsInTraining(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else self.parts[0](x)


def test_a_model_that_was_evaluated_first_says_that_its_training_is_not_captured(caplog):
    converted = fxamp.convert(LoopsInTraining(), dtype="bf16")
    converted.eval()(X)
    assert warnings_of(caplog) == [] and "Dynamo" not in str(fxamp.report(converted).outside)
    for _ in range(2):
        converted.train()(X)
    (said,) = warnings_of(caplog)
    assert said.startswith("LoopsInTraining: in calls that no graph holds 100% of the weights are outside")
    assert "parts.0.weight" in said and "runs as under torch.autocast" in said
    report = fxamp.report(converted)
    assert report.low_precision_nodes > 0 and said.endswith(report.outside[0])


class Unrolled(nn.Module):
    """Each length of a sequence is a graph of its own."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 8)
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
        return h


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_is_told_of_many_lengths_fits_together(caplog):
    converted = fxamp.convert(Unrolled(), dtype="bf16")
    for length in range(1, 30):
        converted(torch.randn(2, length, 8)).sum().backward()
    told = warnings_of(caplog)
    assert any(
        text.startswith("Unrolled: in calls that no graph holds 100% of the weights are outside") for text in told
    )
    for text in told:  # Dynamo has been tried by then, and the calls run low
        assert "capture='dynamo'" not in text and "in float32" not in text and "nothing of" not in text


def test_a_small_part_is_not_said_to_be_nothing():
    model = Around()
    model.head = nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8))
    converted = fxamp.convert(model, dtype="bf16", capture="dynamo")
    converted(X)
    assert fxamp.report(converted).outside[0].startswith("less than 1% of the weights are read by no graph")


class LoopsBehindInTraining(Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return super().forward(x)
        return nn.Sequential.forward(self.loop.parts, self.head(x))


def test_evaluation_does_not_hide_what_dynamo_left_out_in_training(caplog):
    converted = fxamp.convert(LoopsBehindInTraining(), dtype="bf16")
    converted.eval()(X)
    assert warnings_of(caplog) == []
    for _ in range(2):
        converted.train()(X)
    (said,) = warnings_of(caplog)
    assert "in calls that no graph holds 100% of the weights are outside" in said and "loop.parts.0.weight" in said
    assert fxamp.report(converted).outside[0] in said


def test_calls_without_gradients_are_no_training_that_evaluation_could_hide(caplog):
    converted = fxamp.convert(LoopsBehindInTraining(), dtype="bf16")
    converted.eval()(X)
    with torch.no_grad():
        converted.train()(X)
    assert warnings_of(caplog) == [] and fxamp.report(converted).outside == ()


def test_a_batch_that_the_model_refuses_is_no_call_that_is_left_to_dynamo(caplog):
    converted = fxamp.convert(LoopsInTraining(), dtype="bf16").eval()
    converted(X)
    with pytest.raises(RuntimeError):
        converted(X[:, :3])
    assert warnings_of(caplog) == [] and "Dynamo" not in str(fxamp.report(converted).outside)


def test_nothing_is_said_again_when_graphs_of_nothing_come(caplog):
    converted = fxamp.convert(Helped(), dtype="bf16", capture="dynamo")
    for shape in ((2, 8), (3, 2, 8), (2, 2, 2, 8)):
        converted(torch.randn(shape))
    assert [text[:20] for text in warnings_of(caplog)] == ["nothing of Helped wa"]
    assert len(fxamp.report(converted).captures) >= 3, "graphs came with each"


def test_a_call_under_a_dispatch_mode_is_no_reason_to_warn(caplog):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    converted = fxamp.convert(Block(), dtype="bf16", capture="dynamo")
    with Mode():
        converted(X)
    assert warnings_of(caplog) == [] and not fxamp.report(converted).is_preview
    converted(X)
    assert fxamp.report(converted).low_precision_nodes > 0 and warnings_of(caplog) == []


def test_modules_that_share_a_graph_are_all_inside(caplog):
    converted = fxamp.convert(Loop(Block), dtype="bf16", capture="dynamo")
    converted(X)
    assert fxamp.report(converted).outside == () and warnings_of(caplog) == []


def test_a_part_that_was_not_captured_is_counted(caplog):
    converted = fxamp.convert(Around(), dtype="bf16", capture="dynamo")
    converted(X)
    (outside,) = fxamp.report(converted).outside
    assert outside.startswith("75% of the weights are read by no graph and run as they are (loop.parts.0.weight")


class Grows(Around):
    """Of its weights 80 % are outside, then 60 %."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.loop(self.head(x)).relu()
        return x if x.dim() == 2 else self.tail(x)


@pytest.mark.parametrize(("kind", "blocks"), [(Loop, ["parts.*"]), (Grows, ["loop.parts.*", "tail"])])
def test_the_remedy_converts_what_was_left_out(kind, blocks, caplog):
    fxamp.convert(kind(), dtype="bf16", capture="dynamo")(X)
    (said,) = warnings_of(caplog)
    assert f"fxamp.convert(model, boundaries={blocks})" in said
    converted = fxamp.convert(kind(), dtype="bf16", boundaries=blocks)
    converted(X)
    precisions = [row.precision for row in fxamp.report(converted).rows if row.op == "linear"]
    assert precisions and set(precisions) == {"low"}
    assert "loop" not in str(fxamp.report(converted).outside)


def test_the_remedy_names_parts_of_the_model_itself_where_no_list_holds_them():
    assert "boundaries=['encoder', 'head'])" in _why(["encoder.mlp.fc.weight", "encoder.norm.weight", "head.weight"])
    assert "boundaries" not in _why(["weight"])


def test_a_model_of_which_most_was_not_captured_says_so_once(caplog):
    converted = fxamp.convert(Grows(), dtype="bf16", capture="dynamo")
    for shape in ((2, 8), (2, 8), (3, 2, 8), (2, 2, 2, 8)):
        converted(torch.randn(shape))
    (said,) = warnings_of(caplog)
    assert said.startswith("most of Grows was not converted: 80% of the weights are read by no graph")
    assert "loop.parts.0.weight" in said and "graph break inside a loop" in said
    assert "60%" in fxamp.report(converted).outside[0]


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def test_a_recurrent_layer_on_a_packed_sequence_is_told_from_a_frame_that_is_given_up(caplog):
    converted = fxamp.convert(Packs(), dtype="bf16", capture="dynamo")
    converted(torch.randn(2, 3, 8), torch.tensor([3, 2]))
    (outside,) = fxamp.report(converted).outside
    assert outside.startswith("89% of the weights are read by no graph and run as they are (lstm.weight_ih_l0")
    assert "PackedSequence" in outside and "fxamp.convert(model.lstm)" in outside and "graph break" not in outside
    assert warnings_of(caplog) == [f"most of Packs was not converted: {outside}"]


class Spare(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


def test_weights_that_forward_does_not_use_are_not_said_to_be_what_dynamo_gave_up_alone(caplog):
    converted = fxamp.convert(Spare(), dtype="bf16", capture="dynamo")
    converted(X)
    (outside,) = fxamp.report(converted).outside
    assert "(spare.weight)" in outside and "Weights that forward does not use count, too." in outside
    assert warnings_of(caplog) == []  # half of them


def test_a_symbolic_model_has_nothing_outside():
    converted = fxamp.convert(Block(), dtype="bf16")
    converted(X)
    assert fxamp.report(converted).outside == ()


def hooked(count, make=lambda: nn.Linear(8, 8)):
    """A model of four layers, the first ones with hooks, as adapters and recorders of activations set them."""
    model = nn.Sequential(*(make() for _ in range(4)))
    for layer in model[:count]:
        layer.register_forward_hook(lambda module, args, output: output * 2)
    return model


HELD = [(4, "nothing of Sequential was converted: 100%"), (3, "most of Sequential was not converted: 75%"), (2, "")]


@pytest.mark.parametrize("example", [None, (X,)], ids=["preview", "example"])
@pytest.mark.parametrize("count, text", HELD)
def test_most_weights_in_modules_with_hooks_are_a_warning_said_once(count, text, example, caplog):
    converted = fxamp.convert(hooked(count), dtype=torch.bfloat16, example_inputs=example, capture="symbolic")
    for x in (X, X[:1]):
        converted(x)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == bool(text)
    if text:
        assert messages[0].startswith(
            f"{text} of the weights are in modules with hooks, which run whole, in float32, while they have them (0"
        )
        assert "boundaries=[...]" in messages[0]


MAKERS = {"hooks": lambda: nn.Linear(8, 8), "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8))}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_it_says_of_hooks_helps(make, caplog):
    model = hooked(4, make).eval()
    converted = fxamp.convert(model, dtype=torch.bfloat16, boundaries=["0", "1", "2", "3"])
    found, expected = converted(X), model(X)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    assert fxamp.report(converted).low_precision_nodes >= 4
    # Four layers, each of which rounds its input, its weight and its result once to 8 bits.
    assert (found - expected).norm() <= 4 * 3 * 2**-9 * expected.norm()


def test_weights_of_a_converted_model_inside_a_module_with_hooks_are_not_left_out(caplog):
    inner = nn.Sequential(fxamp.convert(nn.Linear(8, 8), dtype=torch.bfloat16))
    inner.register_forward_hook(lambda module, args, output: output * 2)
    fxamp.convert(nn.Sequential(inner), dtype=torch.bfloat16)(X)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_line_and_an_op_of_a_forward_that_runs_as_written_are_explained():
    converted = fxamp.convert(Choosing(), torch.float16)
    for _ in range(3):
        converted(batch(0)).sum().backward()
    code = Choosing.forward.__code__
    for line in range(code.co_firstlineno, code.co_firstlineno + 3):
        text = fxamp.explain(converted, f"choosing.py:{line}")
        assert text.startswith(
            f"source line choosing.py:{line}, in the forward of the model (Choosing): no graph holds"
        )
        assert "runs as under torch.autocast" in text
    with pytest.raises(OptionError, match=r"'sum' is no node.* What is outside of the graphs: .*torch.autocast"):
        fxamp.explain(converted, "sum")
    with pytest.raises(OptionError, match=r"'choosing.py:1' is no node"):
        fxamp.explain(converted, "choosing.py:1")
    assert "in module stem (Block)" in fxamp.explain(converted, "add")


def test_hooks_of_a_summary_are_no_news_of_a_model_that_trains_in_graphs(caplog):
    """Tools put hooks on every module for one call without gradients. Such hooks in training are told of."""
    model = fxamp.convert(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 5)), torch.bfloat16)
    x = torch.randn(8, 32)
    model(x).sum().backward()
    handles = [part.register_forward_hook(lambda module, args, result: None) for part in model]
    with caplog.at_level(logging.WARNING, "fxamp"):
        with torch.no_grad():
            model.eval()(x)
        assert warnings_of(caplog) == []
        model.train()(x).sum().backward()
    (said,) = warnings_of(caplog)
    assert said.startswith("nothing of Sequential was converted")
    for handle in handles:
        handle.remove()

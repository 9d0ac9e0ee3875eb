"""Numbers that Python reads of tensors which forward makes of constants and sizes alone."""

import operator

import pytest
import torch
from torch import nn

import fxamp
from fxamp.capture.computed import sources
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of

LOW = torch.bfloat16


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.fc, self.head, self.many = nn.Linear(8, 8), head, 3

    def forward(self, x):
        return self.head(self, self.fc(x))


def written(made, x):
    made[0] = x.sum()
    return x * (2 if made[0] > 0 else 3)


def written_through_a_view(made, x):
    made[1:].fill_(7.0)
    return x * (2 if made[1] > 0 else 3)


OF_CONSTANTS = {
    "dimensions": lambda m, x: x - x.mean(torch.arange(1, len(x.shape)).tolist(), keepdim=True),
    "item": lambda m, x: x * torch.tensor([1.0, 3.0]).max().item(),
    "loop": lambda m, x: sum((x for t in torch.linspace(0, 1, m.many) if t < 0.9), x),
    "dtype": lambda m, x: x * float(torch.tensor(2.5, dtype=x.dtype, device=x.device)),
}
OF_SIZES = {
    "ceil": lambda m, x: x * int(torch.ceil(torch.tensor(x.shape[0] / 4))),
    "bool": lambda m, x: x * 2 if torch.arange(x.shape[0]).sum() > 5 else x,
    "list": lambda m, x: sum(x * number for number in torch.linspace(0, 1, x.shape[0]).tolist()),
    "item of a size": lambda m, x: x * 2 if torch.tensor(x.shape).prod().item() > 30 else x,
}
OF_DATA = {
    "data": lambda m, x: x * (2 if x.sum() > 0 else 3),
    "like data": lambda m, x: x * (2 if (torch.zeros(()) + x.sum()).item() > 0 else 3),
    "weights": lambda m, x: x * (2 if (torch.ones(8) + m.fc.bias).sum() > 0 else 3),
    "drawn": lambda m, x: x * (2 if torch.rand(()) > 0.5 else 3),
    "strides": lambda m, x: x * float(torch.tensor(x.stride(0))),
    "written": lambda m, x: written(torch.zeros(3), x),
    "written through a view": lambda m, x: written_through_a_view(torch.zeros(3), x),
}


@pytest.mark.parametrize(
    "options", [{}, {"example_inputs": True}, {"example_inputs": True, "opt_level": "O2"}], ids=str
)
@pytest.mark.parametrize("head", OF_CONSTANTS | OF_SIZES)
def test_what_constants_and_sizes_decide_on_is_known(head, options):
    torch.manual_seed(0)
    model, inputs = Model((OF_CONSTANTS | OF_SIZES)[head]), [torch.randn(rows, 8) for rows in (3, 5)]
    wanted = [model(x).detach() for x in inputs]
    given = {**options, "example_inputs": (inputs[0],)} if options else {}
    ours = fxamp.convert(model, LOW, **given)
    for x, want in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(ours(x).float(), want, rtol=0.05, atol=0.05)
    assert set(fxamp.report(ours).captures) == {"symbolic"}


READS = ("item", "tolist", "float")
UNDECIDED = {
    **{name: OF_CONSTANTS[name] for name in ("dimensions", "item", "dtype")},
    "a size that Python does not decide on": lambda m, x: x.reshape(torch.tensor(x.shape).prod().item()),
}


@pytest.mark.parametrize("head", UNDECIDED)
def test_what_python_does_not_decide_on_binds_a_graph_to_nothing(head):
    model = Model(UNDECIDED[head])
    ours = fxamp.convert(model, LOW, example_inputs=(torch.randn(3, 8),))
    for rows in (3, 4, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(ours(x), model(x), rtol=0.05, atol=0.05)
    assert not [each for each in engine_of(ours).all_variants() if each.captured.decisions]
    reads = [
        node for each in engine_of(ours).all_variants() for node in each.captured.graph.nodes if node.target in READS
    ]
    assert len(reads) == (head not in OF_CONSTANTS)  # a number that is known is one of the graph


def test_a_number_of_the_model_that_a_tensor_is_made_of_is_read_again():
    model, x = Model(OF_CONSTANTS["loop"]), torch.randn(3, 8)
    ours = fxamp.convert(model, LOW)
    for many in (3, 5, 2, 6):
        ours.many = model.many = many
        torch.testing.assert_close(ours(x), model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("head", OF_DATA)
def test_what_data_decides_on_is_not(head):
    with pytest.raises(CaptureError, match="decides the control flow"):
        fxamp.convert(Model(OF_DATA[head]), LOW, capture="symbolic", example_inputs=(torch.randn(3, 8),))


def _graph():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    return graph, x


def _made(graph, method, *args):
    """A node whose value is known."""
    node = graph.call_method(method, args)
    node.meta["val"] = torch.ones(3)
    return node


def test_what_comes_before_a_write_into_an_input_is_of_the_input_whenever_it_is_asked():
    graph, x = _graph()
    before = _made(graph, "mul", x, 2)
    write = _made(graph, "add_", x, 1)
    write.meta["val"] = x.meta["val"]
    after = _made(graph, "mul", x, 2)
    for _ in range(2):
        assert sources(after, from_inputs=True) is None
        assert sources(before, from_inputs=True) == [x]


def test_a_write_into_what_numbers_make_is_none_into_them():
    graph, x = _graph()
    numbers = graph.call_method("tolist", (x,))
    made = graph.call_function(torch.full, ((3,), graph.call_function(operator.getitem, (numbers, 0))))
    made.meta["val"] = torch.ones(3)
    _made(graph, "add_", _made(graph, "relu", made), 1)
    assert sources(graph.call_method("tolist", (x,)), from_inputs=True) == [x]
    assert sources(graph.call_function(torch.tensor, (numbers,)), from_inputs=True) == [x]


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_write_into_a_list_of_numbers_is_seen(is_inner):
    graph, x = _graph()
    numbers = graph.call_method("tolist", (x,))
    part = graph.call_function(operator.getitem, (numbers, 0)) if is_inner else numbers
    graph.call_function(operator.setitem, (part, 0, 1))
    assert sources(graph.call_function(torch.tensor, (numbers,)), from_inputs=True) is None

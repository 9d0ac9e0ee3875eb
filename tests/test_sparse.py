"""Models with sparse tensors, through every public function."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.sparse import hold_the_same
from tests.sparse_graphs import LAYOUTS, X, near

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC):UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]
LOW = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
LEVELS = pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])


class Graph(nn.Module):
    """Two graph convolutions.

    Args:
        edges: a buffer; None: they come with each call.
        kept: a plain attribute.
    """

    def __init__(self, edges=None, kept=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("edges", edges)
        self.kept = kept

    def forward(self, x, given=None):
        edges = given if given is not None else self.kept if self.edges is None else self.edges
        hidden = (edges @ self.first(x)).relu()
        return torch.sparse.mm(edges * 0.5, self.last(hidden))


def make(where, layout):
    """A model, and the arguments of a call."""
    edges = near().to_sparse(layout=layout)
    if where == "input":
        return Graph(), (X, edges)
    return Graph(**{where: edges}), (X,)


WHERE = pytest.mark.parametrize("where", ["edges", "kept", "input"])


def loss(output):
    return output.float().square().mean()


def train(model, inputs, optimizer, scaler=None):
    """Three steps; the losses before each."""
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(*inputs))
        (scaler.scale(value) if scaler else value).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        found.append(float(value.detach()))
    return found


@LOW
@LEVELS
@LAYOUTS
@WHERE
def test_training(where, layout, opt_level, low):
    model, inputs = make(where, layout)
    reference, _ = make(where, layout)
    expected = train(reference, inputs, torch.optim.SGD(reference.parameters(), 0.1))
    converted = fxamp.convert(model, low, example_inputs=inputs, opt_level=opt_level)
    optimizer = torch.optim.SGD(converted.parameters(), 0.1)
    if opt_level != "O1":
        optimizer = fxamp.MasterWeightOptimizer(optimizer)
    found = train(converted, inputs, optimizer, fxamp.LossScaler() if low == torch.float16 else None)
    assert found == pytest.approx(expected, rel=8 * torch.finfo(low).eps)
    converted.eval()
    with torch.no_grad():
        exact = reference(*inputs)
        assert (converted(*inputs) - exact).norm() <= 8 * torch.finfo(low).eps * exact.norm()
        frozen = converted.freeze()(*inputs)
        assert torch.equal(frozen, converted(*inputs))
    if where == "edges":
        assert converted.edges.dtype == torch.float32 and converted.edges.layout == layout
    state = converted.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    converted.load_state_dict(state)


@LAYOUTS
@WHERE
def test_it_is_as_near_as_autocast_where_that_runs(where, layout):
    model, inputs = make(where, layout)
    exact, converted = model(*inputs), fxamp.convert(model, torch.bfloat16, example_inputs=inputs)
    error = (converted(*inputs) - exact).norm()
    with torch.autocast("cpu", torch.bfloat16):
        if layout != torch.sparse_coo:  # autocast casts what it has no kernel for
            with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
                model(*inputs)
            return
        assert error <= 1.1 * (model(*inputs) - exact).norm()


@WHERE
def test_a_copy(where):
    model, inputs = make(where, torch.sparse_coo)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs)
    twin = copy.deepcopy(converted)
    assert torch.equal(twin(*inputs), converted(*inputs))


@LAYOUTS
@WHERE
def test_what_shows_the_graph(where, layout, tmp_path):
    model, inputs = make(where, layout)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs)
    text = str(fxamp.report(converted))
    assert "is sparse: few kernels take a low one" in text
    fxamp.dump(converted, tmp_path)
    assert (tmp_path / "report.html").exists()
    assert "is sparse" in fxamp.explain(converted, "matmul")
    assert fxamp.what_if(converted, deny=["linear"]).low_precision_nodes == 0
    fxamp.report(converted).save_plan(tmp_path / "plan.json")
    again = fxamp.convert(model, torch.bfloat16, example_inputs=inputs, plan=str(tmp_path / "plan.json"))
    assert torch.equal(again(*inputs), converted(*inputs))


@LEVELS
@LAYOUTS
@WHERE
def test_checkpoints(where, layout, opt_level, tmp_path):
    model, inputs = make(where, layout)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs, opt_level=opt_level)
    optimizer = torch.optim.Adam(converted.parameters())
    optimizer = optimizer if opt_level == "O1" else fxamp.MasterWeightOptimizer(optimizer)
    train(converted, inputs, optimizer)
    fxamp.save_checkpoint(tmp_path / "c.pt", model=converted, optimizer=optimizer)
    expected = train(converted, inputs, optimizer)
    if where == "edges":
        with torch.no_grad():
            converted.edges.copy_(converted.edges * 2)
    fxamp.load_checkpoint(tmp_path / "c.pt", model=converted, optimizer=optimizer)
    assert train(converted, inputs, optimizer) == expected
    if where == "edges":
        assert hold_the_same(converted.edges, near().to_sparse(layout=layout))


@LAYOUTS
@WHERE
def test_a_whole_step(where, layout):
    model, inputs = make(where, layout)
    twin, _ = make(where, layout)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs)
    other = fxamp.convert(twin, torch.bfloat16, example_inputs=inputs)
    step = fxamp.GraphedStep(converted, lambda output, _: loss(output), torch.optim.SGD(converted.parameters(), 0.1))
    found = [float(step(inputs if len(inputs) > 1 else inputs[0], torch.zeros(1))) for _ in range(3)]
    assert found == train(other, inputs, torch.optim.SGD(other.parameters(), 0.1))


@LAYOUTS
@WHERE
def test_dynamo_says_that_it_takes_none(where, layout, caplog):
    torch._dynamo.reset()
    model, inputs = make(where, layout)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs, capture="dynamo")
    exact = model(*inputs)
    assert (converted(*inputs) - exact).norm() <= 8 * torch.finfo(torch.bfloat16).eps * exact.norm()
    loss(converted(*inputs)).backward()
    assert "nothing of Graph was converted" in caplog.text and "a sparse tensor among its variables" in caplog.text
    with pytest.raises(fxamp.OptionError, match=r"made no graph of this call of Graph .*a sparse tensor"):
        fxamp.find_nan(converted, inputs)


@LAYOUTS
@WHERE
def test_compiled(where, layout):
    torch._dynamo.reset()
    model, inputs = make(where, layout)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs)
    expected = converted(*inputs)
    assert torch.equal(torch.compile(converted, backend="eager")(*inputs), expected)


class Hop(nn.Module):
    """One convolution, of a graph that it is given."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, edges):
        return torch.sparse.mm(edges, self.fc(x)).relu()


class Attending(nn.Module):
    """Gives a graph."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return (self.fc(x) @ self.fc(x).t()).relu().to_sparse()


class Hops(nn.Module):
    """Blocks between which sparse tensors cross."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attending, self.hops = Attending(), nn.ModuleList([Hop(), Hop()])

    def forward(self, x, edges):
        edges = edges * 0.5 if edges.layout == torch.sparse_csr else edges + self.attending(x)
        for hop in self.hops:
            x = hop(x, edges)
        return x


@pytest.mark.parametrize("boundaries", [(), (Hop,), (Hop, Attending)])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_blocks(layout, boundaries):
    model, inputs = Hops(), (X, near().to_sparse(layout=layout))
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs, boundaries=boundaries)
    exact = model(*inputs)
    assert (converted(*inputs) - exact).norm() <= 8 * torch.finfo(torch.bfloat16).eps * exact.norm()
    loss(converted(*inputs)).backward()
    found = fxamp.compare(model, converted, inputs, loss)
    assert found.output == pytest.approx(float((converted(*inputs) - exact).norm() / exact.norm()), rel=1e-5)
    assert fxamp.find_nan(converted, inputs, loss) is None
    assert fxamp.what_if(converted, deny=["linear"]).low_precision_nodes < fxamp.report(converted).low_precision_nodes

"""Measures of a model with sparse tensors: of what they store."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.numerics.distance import error_of, largest_difference, share_flushed
from fxamp.numerics.histogram import Histogram
from fxamp.sparse import hold_the_same
from tests.sparse_graphs import LAYOUTS, X, near

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC):UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


class Buffer(nn.Module):
    """A graph convolution that holds the graph."""

    def __init__(self, edges):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("edges", edges)

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.last((self.edges @ self.first(x)).relu()))


class Input(Buffer):
    """One that is given the graph."""

    def __init__(self, _):
        super().__init__(None)

    def forward(self, x, edges):
        return torch.sparse.mm(edges * 0.5, self.last((edges.t() @ self.first(x)).relu()))


class Made(Input):
    """One that makes a graph of what it is given."""

    def forward(self, x):
        h = self.first(x)
        return torch.sparse.mm((h @ h.t()).relu().to_sparse() * 0.1, self.last(h))


def cases(layout):
    edges = near().to_sparse(layout=layout)
    return [(Buffer(edges), (X,)), (Input(edges), (X, edges)), (Made(edges), (X,))]


def loss(output):
    return output.square().mean()


@LAYOUTS
@pytest.mark.parametrize("number", range(3))
def test_compare(number, layout):
    model, inputs = cases(layout)[number]
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs)
    found = fxamp.compare(model, converted, inputs, loss)
    assert 0 < found.output < 0.02
    assert {row.name for row in found.weights} == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert all(row.error < 0.03 for row in found.weights)
    exact, mixed = model(*inputs).detach(), converted(*inputs).detach()
    assert found.output == pytest.approx(float((exact - mixed).norm() / exact.norm()), rel=1e-5)


@LAYOUTS
@pytest.mark.parametrize("number", range(3))
def test_what_finds_nothing_wrong(number, layout):
    model, inputs = cases(layout)[number]
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs)
    assert fxamp.find_nan(converted, inputs, loss) is None
    with fxamp.watch_nan(converted):
        loss(converted(*inputs)).backward()
    assert len(fxamp.find_deny(model, converted, inputs, 1e-4).nodes) > 0
    assert "linear" in str(fxamp.audit(model, inputs)) or fxamp.audit(model, inputs).findings == ()


@LAYOUTS
def test_find_nan_names_the_buffer_that_is_not_finite(layout):
    edges = near()
    edges[edges > 0.9] = torch.nan
    model = fxamp.convert(Buffer(edges.to_sparse(layout=layout)), torch.bfloat16, example_inputs=(X,))
    found = fxamp.find_nan(model, (X,), loss)
    assert found.name == "edges" and "4 nan" in str(found)


def test_watch_nan_names_what_makes_a_sparse_value_overflow():
    class Large(Made):
        def forward(self, x):
            h = self.first(x)
            edges = (h @ h.t()).relu().to_sparse()
            return torch.sparse.mm(edges * 3e38 * 1e3, self.last(h))

    model = fxamp.convert(Large(None), torch.bfloat16, example_inputs=(X,))
    with pytest.raises(FloatingPointError, match="mul"), fxamp.watch_nan(model):
        model(X)


@LAYOUTS
def test_ranges_are_those_of_what_is_stored(layout):
    model, inputs = cases(layout)[1]
    ranges = fxamp.profile(model, [inputs], loss, progress=False)
    edges = near() * 0.5
    (scaled,) = (found for found in ranges.nodes.values() if found.op == "mul")
    assert scaled.values.total == scaled.values.nonzero == int((edges != 0).sum())
    assert scaled.values.largest == float(edges.max())
    converted = fxamp.convert(model, torch.float16, example_inputs=inputs, ranges=ranges)
    torch.testing.assert_close(converted(*inputs), model(*inputs), rtol=0.01, atol=0.01)


@LAYOUTS
def test_a_batch_that_is_not_finite_is_refused(layout):
    edges = near()
    edges[0, 0] = torch.nan
    with pytest.raises(fxamp.OptionError, match="NaN or infinite inputs"):
        fxamp.profile(Input(None), [(X, edges.to_sparse(layout=layout))], loss, progress=False)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_look_leaves_buffers_as_they_were(layout):
    class Decaying(Buffer):
        def forward(self, x):
            self.edges.mul_(0.5)
            return super().forward(x)

    model = Decaying(near().to_sparse(layout=layout))
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(X,))
    before = model.edges.clone()
    fxamp.compare(model, converted, (X,), loss)
    fxamp.find_nan(converted, (X,), loss)
    fxamp.profile(model, [(X,)], loss, progress=False)
    assert hold_the_same(model.edges, before)
    converted(X)
    assert not hold_the_same(model.edges, before)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_look_leaves_inputs_as_they_were(layout):
    class Decaying(Input):
        def forward(self, x, edges):
            return super().forward(x, edges.mul_(0.5))

    model, edges = Decaying(None), near().to_sparse(layout=layout)
    before = edges.clone()
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(X, edges))
    fxamp.compare(model, converted, (X, edges), loss)
    fxamp.find_nan(converted, (X, edges), loss)
    assert hold_the_same(edges, before)


def test_gradients_in_compressed_rows():
    class Attention(Input):
        def forward(self, x, edges):
            h = self.first(x)
            return torch.sparse.mm(torch.sparse.sampled_addmm(edges, h, h.t()), self.last(h))

    model, inputs = Attention(None), (X, near().to_sparse_csr())
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs)
    found = fxamp.compare(model, converted, inputs, loss, scale=1024.0)
    assert max(row.gradient or 0.0 for row in found.rows) < 0.03 and found.output < 0.02


@pytest.mark.parametrize("measure", [error_of, largest_difference, share_flushed])
@pytest.mark.parametrize("layout", [*"coo csr csc".split(), "bsr"])
def test_distances_are_those_of_the_dense_tensors(measure, layout):
    one, other = near(), near(5) * (near() > 0.5)
    blocks = {"blocksize": (2, 2)} if layout == "bsr" else {}
    sparse = [each.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **blocks) for each in (one, other)]
    assert measure(*sparse) == pytest.approx(measure(one, other), rel=1e-12) != 0


def test_distances_where_numbers_are_not_finite():
    one, other = near(), near()
    other[other > 0.9] = torch.inf
    assert error_of(one.to_sparse(), other.to_sparse()) == torch.inf
    assert error_of(other.to_sparse(), other.to_sparse()) == 0


def test_numbers_that_stand_in_one_place_are_added_before_they_are_counted():
    twice = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 3.0], (2, 2))
    histogram = Histogram()
    histogram.add(twice)
    assert histogram.exponents() == {2: 1}


@pytest.mark.parametrize("bag", [None, "sum", "mean"])
def test_sparse_gradients(bag):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.EmbeddingBag(12, 8, mode=bag, sparse=True) if bag else nn.Embedding(12, 8, sparse=True)
            self.last = nn.Linear(8, 4)

        def forward(self, ids):
            return self.last(self.table(ids))

    model, ids = Words(), torch.tensor([[1, 2, 1], [4, 4, 0]])
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(ids,))
    found = fxamp.compare(model, converted, (ids,), loss)
    (row,) = (row for row in found.weights if row.name == "table.weight")
    assert 0 < row.error < 0.02
    assert fxamp.find_nan(converted, (ids,), loss) is None
    with fxamp.watch_nan(converted):
        loss(converted(ids)).backward()
    assert converted.table.weight.grad.is_sparse

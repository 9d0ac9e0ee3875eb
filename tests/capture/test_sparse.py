"""Sparse tensors among the inputs, the buffers and the attributes: which graph holds for a call."""

import pytest
import torch
from torch import nn

import fxamp
from tests.sparse_graphs import LAYOUTS, X, near

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR):UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


class Net(nn.Module):
    """A layer, what `body` makes of its result and of the edges, and another layer."""

    def __init__(self, body, edges=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("edges", edges)

    def forward(self, x, edges=None):
        return self.last(self.body(self.first(x), self.edges if edges is None else edges))


def product(h, edges):
    return edges @ h


def few_or_many(h, edges):
    return edges @ h if edges._nnz() > 30 else h


def with_its_own_count(h, edges):
    return h * torch.ones(edges._nnz()).sum()


def coalesced(h, edges):
    if not edges.is_coalesced():
        edges = edges.coalesce() * 2
    return torch.sparse.mm(edges, h)


def by_parts(h, edges):
    edges = edges.coalesce()
    rows, columns = edges.indices()
    return torch.zeros_like(h).index_add(0, rows, edges.values()[:, None] * h[columns])


def by_compressed_rows(h, edges):
    many = edges.crow_indices().diff()
    rows = torch.repeat_interleave(torch.arange(10), many)
    return torch.zeros_like(h).index_add(0, rows, edges.values()[:, None] * h[edges.col_indices()])


def is_it_sparse(h, edges):
    if edges.is_sparse or edges.layout == torch.sparse_csr:
        return torch.sparse.mm(edges, h)
    return edges.tanh() @ h


def assert_as(net, model, *args):
    exact = net(*args)
    torch.testing.assert_close(model(*args), exact, rtol=0.02, atol=0.02 * float(exact.detach().abs().max()))


def few(layout=torch.sparse_coo):
    return torch.eye(10).to_sparse(layout=layout)


def doubled():
    """An edge that stands twice among others."""
    edges = near().to_sparse_coo()
    places, weights = edges.indices(), edges.values()
    return torch.sparse_coo_tensor(torch.cat([places, places[:, :1]], 1), torch.cat([weights, weights[:1]]), (10, 10))


@LAYOUTS
@pytest.mark.parametrize("body", [product, is_it_sparse])
def test_a_dense_input_and_a_sparse_one(body, layout):
    net = Net(body)
    model = fxamp.convert(net, torch.bfloat16, example_inputs=(X, near()), capture="symbolic")
    for edges in (near(), near().to_sparse(layout=layout), near(5), near(5).to_sparse(layout=layout)):
        if layout != torch.sparse_csc or body is product:
            assert_as(net, model, X, edges)


@LAYOUTS
def test_a_buffer_that_becomes_sparse(layout):
    net = Net(product, near())
    model = fxamp.convert(net, torch.bfloat16, example_inputs=(X,), capture="symbolic")
    for edges in (near(), near().to_sparse(layout=layout), near(5)):
        net.edges = edges
        assert_as(net, model, X)


@LAYOUTS
def test_an_attribute_that_becomes_sparse(layout):
    net = Net(product)
    del net.edges
    net.edges = near()
    model = fxamp.convert(net, torch.bfloat16, example_inputs=(X,), capture="symbolic")
    for edges in (near(), near().to_sparse(layout=layout), near(5)):
        net.edges = model.edges = edges
        assert_as(net, model, X)


@pytest.mark.parametrize("body", [few_or_many, with_its_own_count, coalesced, by_parts])
def test_python_asks_how_many_numbers_an_input_holds(body):
    net = Net(body)
    model = fxamp.convert(net, torch.bfloat16, example_inputs=(X, near().to_sparse()), capture="symbolic")
    for edges in (near().to_sparse(), few(), doubled(), near(5).to_sparse()):
        assert_as(net, model, X, edges)


@pytest.mark.parametrize("body", [few_or_many, with_its_own_count, coalesced, by_parts])
def test_python_asks_how_many_numbers_a_buffer_holds(body):
    net = Net(body, near().to_sparse())
    model = fxamp.convert(net, torch.bfloat16, example_inputs=(X,))
    for edges in (near().to_sparse(), few(), doubled(), near(5).to_sparse()):
        net.edges = edges
        assert_as(net, model, X)


@pytest.mark.parametrize("is_input", [True, False])
def test_parts_of_compressed_rows(is_input):
    edges = near().to_sparse_csr()
    net = Net(by_compressed_rows, None if is_input else edges)
    example = (X, edges) if is_input else (X,)
    model = fxamp.convert(net, torch.bfloat16, example_inputs=example, capture="symbolic")
    for edges in (near(), torch.eye(10), near(5)):
        if is_input:
            assert_as(net, model, X, edges.to_sparse_csr())
        else:
            net.edges = edges.to_sparse_csr()
            assert_as(net, model, X)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_graph_is_made_again_of_the_types_of_its_inputs(layout):
    def body(h, edges):
        return torch.sparse.mm(edges, h)

    net = Net(body)
    model = fxamp.convert(net, torch.bfloat16, example_inputs=(X, near().to_sparse(layout=layout)))
    other = fxamp.what_if(model, deny=["linear"])
    assert other.low_precision_nodes == 0 < fxamp.report(model).low_precision_nodes
    assert "linear" in fxamp.explain(model, "linear")


def test_sizes_that_vary_beside_a_sparse_input():
    def body(h, edges):
        return torch.sparse.mm(edges, h) if h.shape[0] > 4 else h

    net = Net(body)
    example = X, near().to_sparse_csr()
    model = fxamp.convert(net, torch.bfloat16, example_inputs=example, capture="symbolic")
    for size in (10, 7, 9, 3, 2, 12):
        assert_as(net, model, torch.randn(size, 8), near(size=size).to_sparse_csr())

"""What stands for a sparse tensor has its type: on fake tensors, and where its numbers are not kept."""

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from fxamp.fakes import Fakes
from fxamp.sparse import kind_of, without_numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC):UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]
EYE = torch.eye(6)
SPARSE = {
    "coo": EYE.to_sparse_coo(),
    "coo, twice": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (6, 6)),
    "coo, rows": torch.ones(6, 4).to_sparse(1),
    "coo, none": torch.zeros(6, 6).to_sparse(),
    "csr": EYE.to_sparse_csr(),
    "csr, batch": EYE.expand(2, 6, 6).to_sparse_csr(),
    "csr, rows": torch.ones(6, 6, 3).to_sparse_csr(1),
    "csc": EYE.double().to_sparse_csc(),
    "bsr": EYE.to_sparse_bsr((2, 3)),
    "bsc": EYE.to_sparse_bsc((3, 2)),
    "bsr, batch": EYE.expand(2, 6, 6).to_sparse_bsr((2, 3)),
}
NAMES = pytest.mark.parametrize("name", SPARSE)


def type_of(tensor):
    return kind_of(tensor), tensor.shape, tensor.requires_grad


def values_of(tensor):
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


@NAMES
def test_without_numbers(name):
    tensor = SPARSE[name]
    on_meta = without_numbers(tensor, "meta")
    again = without_numbers(on_meta, "cpu")
    assert on_meta.is_meta and not again.is_meta
    for made in (on_meta, again):
        assert type_of(made) == type_of(tensor)
        assert values_of(made).shape == values_of(tensor).shape
        assert tensor.layout != torch.sparse_coo or made.is_coalesced() == tensor.is_coalesced()


@NAMES
def test_fakes_in_another_mode(name):
    fakes = Fakes(nn.Module())
    once = fakes.of(SPARSE[name])
    twice = fakes.in_mode(FakeTensorMode()).of(once)
    assert once is not twice and type_of(once) == type_of(twice) == type_of(SPARSE[name])


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_constructors_of_compressed_tensors(layout, trained, dtype):
    real = SPARSE[layout]
    by_rows = layout in ("csr", "bsr")
    ends = real.crow_indices() if by_rows else real.ccol_indices()
    places = real.col_indices() if by_rows else real.row_indices()
    values = real.values().clone().requires_grad_(trained)
    graph, fakes = fx.Graph(), Fakes(nn.Module())
    for function, how in (
        (getattr(torch, f"sparse_{layout}_tensor"), {}),
        (torch.sparse_compressed_tensor, {"layout": real.layout}),
    ):
        how |= {"dtype": dtype} if dtype else {}
        nodes = {graph.placeholder(f"x{at}"): fakes.of(each) for at, each in enumerate((ends, places, values))}
        node = graph.call_function(function, (*nodes, real.shape), how)
        assert type_of(fakes.run(node, nodes.__getitem__)) == type_of(function(ends, places, values, real.shape, **how))
        ends_by, places_by = ("crow_indices", "col_indices") if by_rows else ("ccol_indices", "row_indices")
        if how.get("layout"):
            ends_by, places_by = "compressed_indices", "plain_indices"
        named = dict(zip((ends_by, places_by, "values"), nodes, strict=True))
        by_name = graph.call_function(function, (), {**named, "size": tuple(real.shape), **how})
        assert type_of(fakes.run(by_name, nodes.__getitem__)) == type_of(fakes.run(node, nodes.__getitem__))
        without_size = graph.call_function(function, tuple(nodes), how)
        with pytest.raises(DynamicOutputShapeException):
            fakes.run(without_size, nodes.__getitem__)


@pytest.mark.parametrize(
    "name, method, error",
    [
        ("coo", "_nnz", DataDependentOutputException),
        ("csr", "_nnz", DataDependentOutputException),
        ("coo", "is_coalesced", DataDependentOutputException),
        ("coo", "indices", DynamicOutputShapeException),
        ("coo", "_values", DynamicOutputShapeException),
        ("csr", "col_indices", DynamicOutputShapeException),
        ("csc", "row_indices", DynamicOutputShapeException),
        ("bsr", "values", DynamicOutputShapeException),
    ],
)
def test_how_many_numbers_there_are_is_not_known(name, method, error):
    graph, fakes = fx.Graph(), Fakes(nn.Module())
    given = graph.placeholder("x")
    node = graph.call_method(method, (given,))
    with pytest.raises(error):
        fakes.run(node, lambda _: fakes.of(SPARSE[name]))


def test_the_ends_of_compressed_rows_are_known():
    graph, fakes = fx.Graph(), Fakes(nn.Module())
    node = graph.call_method("crow_indices", (graph.placeholder("x"),))
    assert fakes.run(node, lambda _: fakes.of(SPARSE["csr"])).shape == (7,)

"""Sparse tensors keep their dtype: what reads or gives one runs in float32."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.dtypes import dtype_name
from tests.sparse_graphs import X, near

LOW = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
LAYOUTS = {
    "coo": torch.Tensor.to_sparse_coo,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC):UserWarning")


class Net(nn.Module):
    """Two linear layers, and between them what `body` makes of the first one's result."""

    def __init__(self, body, sparse=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.near = sparse
        self.register_buffer("ends", torch.tensor([[0, 1, 3, 9], [2, 4, 5, 0]]))

    def forward(self, x):
        return self.last(self.body(self, self.first(x)))


def product(net, h):
    return net.near @ h


def transposed(net, h):
    return torch.mm(net.near.t(), h).relu()


def scaled(net, h):
    return torch.sparse.mm(net.near * 0.5, h)


def added(net, h):
    return torch.sparse.addmm(h, net.near, h, beta=0.5)


def vectors(net, h):
    return h + torch.mv(net.near, h[:, 0])[:, None]


def made_of_a_dense_one(net, h):
    return (h @ h.t()).relu().to_sparse() @ h


def softmax(net, h):
    return torch.sparse.mm(torch.sparse.softmax((h @ h.t()).relu().to_sparse(), 1), h)


def summed(net, h):
    return h + torch.sparse.sum((h @ h.t()).relu().to_sparse(), 1).to_dense()[:, None]


def made_of_edges(net, h):
    edges = (h[net.ends[0]] * h[net.ends[1]]).sum(-1).sigmoid()
    return torch.sparse_coo_tensor(net.ends, edges, (10, 10)).coalesce() @ h


def made_of_edges_that_are_low(net, h):
    edges = net.last(h[net.ends[0]] * h[net.ends[1]])[:, 0]
    return torch.sparse_coo_tensor(net.ends, edges, (10, 10)).coalesce() @ h


def made_of_compressed_rows(net, h):
    edges = h[:, :2].reshape(-1)
    return torch.sparse_csr_tensor(torch.arange(0, 21, 2), torch.arange(20) % 10, edges, (10, 10)) @ h


def gradients(net, run):
    net.zero_grad()
    run(X).square().mean().backward()
    return {name: weight.grad.clone() for name, weight in net.named_parameters()}


def assert_near(found, exact, low, factor=8):
    """The numbers differ by a few roundings of the low dtype; a layer's products are rounded three times or so."""
    assert (found - exact).norm() <= factor * torch.finfo(low).eps * exact.norm()


def check(net, low, **how):
    """Numbers and gradients of the converted model are those of the model; no sparse value is cast."""
    exact, expected = net(X), gradients(net, net)
    model = fxamp.convert(net, low, example_inputs=(X,), capture="symbolic", **how)
    assert_near(model(X), exact, low)
    for name, gradient in gradients(net, model).items():
        assert_near(gradient, expected[name], low)
    return model


@LOW
@LAYOUT
@pytest.mark.parametrize("body", [product, transposed, scaled, added, vectors])
def test_products_with_a_sparse_attribute(body, layout, low):
    model = check(Net(body, LAYOUTS[layout](near())), low)
    assert {row.dtype for row in fxamp.report(model).rows if row.op == "linear"} == {dtype_name(low)}


@LOW
@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize(
    "body", [made_of_a_dense_one, softmax, summed, made_of_edges, made_of_edges_that_are_low, made_of_compressed_rows]
)
def test_sparse_tensors_made_by_forward(body, level, low):
    check(Net(body), low, level=level)


@pytest.mark.parametrize("body", [product, transposed])
def test_the_reason_names_the_sparse_value(body):
    model = fxamp.convert(Net(body, near().to_sparse_csr()), example_inputs=(X,))
    (row,) = (row for row in fxamp.report(model).rows if row.op in ("matmul", "mm"))
    assert row.dtype == "float32" and "is sparse: few kernels take a low one" in row.reason


def test_what_the_user_made_low_stays_low():
    def body(net, h):
        return (net.near.to(torch.bfloat16) @ h.to(torch.bfloat16)).float()

    model = check(Net(body, near().to_sparse_coo()), torch.bfloat16)
    (row,) = (row for row in fxamp.report(model).rows if row.op == "matmul")
    assert row.dtype == "bfloat16"


@LAYOUT
def test_no_work_and_no_bytes_are_told_of_a_sparse_product(layout):
    net = Net(scaled, LAYOUTS[layout](near()))
    net.body = lambda net, h: (net.near * 0.5) @ h
    report = fxamp.report(fxamp.convert(net, torch.bfloat16, example_inputs=(X,), pad="always"))
    assert report.coverage == 1 and {gemm.node for gemm in report.gemms} == {"linear", "linear_1"}
    assert not [row for row in report.padded if row.node == "matmul"]
    assert max(region.nbytes for region in report.regions) == 10 * 16 * 4

"""Writes that Dynamo's graphs hold in functions that are not torch's own."""

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode

import fxamp
from fxamp.capture.dynamo import note_writes
from fxamp.fakes import Fakes
from fxamp.inplace import mutated


@torch.compiler.allow_in_graph
def add_one(tensor):
    tensor.add_(1)
    return tensor.sum()


def item(value):
    value.numpy()[0] = 1


def rows(value):
    row = value.numpy()[0]
    row[:] = 1


def operator(value):
    array = value.numpy()
    array += 1


def shared(value):
    torch.from_numpy(value.numpy() if value.numel() else value).add_(1)


def out(value):
    np.add(value.numpy(), 1, out=value.numpy())


def method(value):
    value.numpy().fill(3)


def transposed(value):
    value.numpy().T.fill(3)


def own_function(value):
    add_one(value)


class Written(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.first, self.last, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write

    def forward(self, x):
        value = self.first(x).detach()
        self.write(value)
        return self.last(value), x + value


@pytest.mark.parametrize("write", [item, rows, operator, shared, out, method, transposed, own_function])
def test_a_write_reaches_what_reads_the_value(write):
    model, x = Written(write), torch.randn(3, 8)
    converted = fxamp.convert(model, torch.bfloat16, capture="dynamo")
    for got, expected in zip(converted(x), model(x), strict=True):
        torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)  # a lost write is off by one or more
    assert fxamp.report(converted).gemms


def read_only(tensor):
    return tensor.sum()


def fails(tensor):
    raise RuntimeError("on fakes")


@pytest.mark.parametrize(
    "target, arguments, is_written",
    [
        (read_only, lambda given: ((given,),), False),
        (fails, lambda given: ((given,),), True),
        (triton_kernel_wrapper_mutation, lambda given: ((), {"kernel_idx": 0, "kwargs": {"out": given}}), True),
    ],
)
def test_what_does_not_tell_may_write_all(target, arguments, is_written):
    graph, mode = fx.Graph(), FakeTensorMode()
    given = graph.placeholder("given")
    with mode:
        given.meta["val"] = torch.randn(3)
    node = graph.call_function(target, *arguments(given))
    note_writes(graph, Fakes(nn.Module(), mode=mode))
    assert mutated(node) == [given] * is_written
    assert given.meta["val"]._version == 0

"""Functions of torch's that somebody has replaced, for good or for a while: each call does what eager would do now."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.model.engine import engine_of

X = torch.linspace(-1, 1, 32).reshape(4, 8)

CALLS = {
    (F, "linear"): lambda h: h,  # which the layer before it calls
    (F, "gelu"): lambda h: F.gelu(h),
    (F, "softmax"): lambda h: F.softmax(h, -1),
    (F, "relu"): lambda h: F.relu(h),
    (F, "layer_norm"): lambda h: F.layer_norm(h, (8,)),
    (F, "normalize"): lambda h: F.normalize(h),
    (F, "scaled_dot_product_attention"): lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    (torch, "tanh"): lambda h: torch.tanh(h),
    (torch, "matmul"): lambda h: torch.matmul(h, h.t()),
    (torch, "einsum"): lambda h: torch.einsum("ij,kj->ik", h, h),
    (torch, "cat"): lambda h: torch.cat([h, h]),
}


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.fc, self.call = nn.Linear(8, 8), call

    def forward(self, x):
        return self.call(self.fc(x))


def doubling(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def alone(function):
    return lambda x, *args, **kwargs: x * 3


@pytest.mark.parametrize("is_first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("instead", [doubling, alone])
@pytest.mark.parametrize(("space", "name"), CALLS, ids=lambda each: getattr(each, "__name__", each))
def test_each_call_takes_what_stands_there(space, name, instead, is_first, monkeypatch, fresh_dynamo):
    if instead is alone and name in ("einsum", "cat"):
        pytest.skip("its first argument is no tensor")
    torch.manual_seed(0)
    model = Net(CALLS[space, name])
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, overrides={"*": "deny"})
    for is_replaced in (is_first, not is_first, is_first, not is_first):
        with monkeypatch.context() as patched:
            if is_replaced:
                patched.setattr(space, name, instead(getattr(space, name)))
            assert torch.allclose(converted(X), model(X), rtol=1e-6), is_replaced


def test_attention_is_the_users_own_kernel(monkeypatch):
    """As SageAttention is used: it stands there before the conversion, and for good."""

    def mine(q, k, v, **options):
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", mine)
    model = Net(CALLS[F, "scaled_dot_product_attention"])
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, overrides={"*": "deny"})
    for _ in range(3):
        assert torch.allclose(converted(X), model(X), rtol=1e-6)
    assert len(engine_of(converted).all_variants()) == 1


def test_a_function_that_the_model_does_not_call_is_of_no_matter(monkeypatch):
    converted = fxamp.convert(Net(lambda h: F.relu(h)), torch.bfloat16)
    converted(X)
    monkeypatch.setattr(F, "softmax", doubling(F.softmax))
    monkeypatch.setattr(torch, "save", lambda *_: None)
    converted(X)
    assert len(engine_of(converted).all_variants()) == 1

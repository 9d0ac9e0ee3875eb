"""Packed weights do what one cast per weight does, in every way a training loop can call them."""

import contextlib
import copy
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp import recorded
from fxamp.model.engine import engine_of
from fxamp.passes.pack import PackWeights
from fxamp.runtime.packed_weights import KeptCast, packed_cast
from fxamp.runtime.streams import MadeOn

LOW = (torch.float16, torch.bfloat16)


class Net(nn.Module):
    """Three layers; `spare` is used by nobody, `head` shares the weight of `middle`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.spare = nn.Linear(4, 4)
        self.head.weight = self.middle.weight

    def forward(self, x):
        return self.head(F.gelu(self.middle(F.gelu(self.first(x)))))


class Ops(TorchDispatchMode):
    """Names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def nets(x, monkeypatch) -> tuple[nn.Module, nn.Module]:
    """The same model with packed and with plain casts; they share no parameter."""
    torch.manual_seed(0)
    model = Net()
    packed = fxamp.convert(copy.deepcopy(model), torch.bfloat16, example_inputs=(x,))
    with monkeypatch.context() as patch:
        patch.setattr(PackWeights, "apply", lambda self, graph: False)
        plain = fxamp.convert(copy.deepcopy(model), torch.bfloat16, example_inputs=(x,))
    assert [buckets_of(packed), buckets_of(plain)] == [1, 0]
    return packed, plain


def buckets_of(converted: nn.Module) -> int:
    return sum(n.target is packed_cast for v in engine_of(converted).all_variants() for n in v.graph.nodes)


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_grads(nets) -> None:
    ours, theirs = grads_of(nets[0]), grads_of(nets[1])
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        assert (found is None) == (theirs[name] is None), name
        assert found is None or (found.dtype == torch.float32 and torch.equal(found, theirs[name])), name


# ----------------------------------------------------------------------------------------------- the function


@pytest.mark.parametrize("low", LOW)
def test_copies_are_what_to_gives_and_keep_strides(low):
    weights = (
        torch.randn(3, 4) * 1e5,
        torch.randn(8, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(()),
    )
    for copied, weight in zip(packed_cast(low, *weights), weights, strict=True):
        assert copied.dtype == low and copied.stride() == weight.stride()
        assert torch.equal(copied, weight.to(low))


@pytest.mark.parametrize("is_training", [True, False])
def test_one_launch_each_way(is_training):
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(5)]
    with Ops() as ops, torch.set_grad_enabled(is_training):
        copies = packed_cast(torch.float16, *weights)
        assert ops.names.count("_foreach_copy_") == 1 and "_to_copy" not in ops.names
        if is_training:
            torch.autograd.backward(copies, [torch.ones_like(c) for c in copies])
            assert ops.names.count("_foreach_copy_") == 2 and "_to_copy" not in ops.names
            assert "clone" not in ops.names and "copy_" not in ops.names, "gradients are taken over, not copied"


def test_a_gradient_is_none_where_there_is_none():
    used, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    a, b, c = packed_cast(torch.float16, used, unused, frozen)
    assert [a.requires_grad, b.requires_grad, c.requires_grad] == [True, True, False]
    (a * c).sum().backward()
    assert used.grad is not None and unused.grad is None and frozen.grad is None


def _histories():
    """Two buffers an earlier call computed, and the leaves they were computed of."""
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    return leaves, [leaf.exp() for leaf in leaves]


@pytest.mark.parametrize("make", [lambda: packed_cast, lambda: KeptCast(0)])
def test_backward_goes_through_the_history_of_the_one_buffer_it_is_for(make):
    leaves, (stale, fresh) = _histories()
    stale.sum().backward()  # its graph is freed
    seen = leaves[0].grad.clone()
    copies = make()(torch.bfloat16, stale, fresh, are_buffers=True)
    copies[1].float().sum().backward()
    assert torch.equal(leaves[0].grad, seen) and leaves[1].grad is not None
    with pytest.raises(RuntimeError, match="a second time"):
        copies[0].float().sum().backward()


@pytest.mark.parametrize("pads", [None, (None, (((1, 1),), 2.0))])
def test_buffers_without_a_history_are_one_launch_and_no_graph(pads):
    buffers = [torch.rand(2), torch.rand(3)]
    with Ops() as ops:
        copies = packed_cast(torch.float16, *buffers, pads=pads, are_buffers=True)
    assert ops.names.count("_foreach_copy_") == 1 and "_to_copy" not in ops.names
    assert not any(copy.requires_grad for copy in copies)
    assert torch.equal(copies[0], buffers[0].half()) and torch.equal(copies[1][:3], buffers[1].half())


def test_sparse_and_expanded_gradients():
    table, bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.ones(3))
    low_table, low_bias = packed_cast(torch.bfloat16, table, bias)
    (F.embedding(torch.tensor([1, 1, 4]), low_table, sparse=True).sum() + low_bias.sum()).backward()
    assert table.grad.is_sparse and table.grad.dtype == torch.float32
    assert torch.equal(table.grad.to_dense()[:, 0], torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0]))
    assert torch.equal(bias.grad, torch.ones(3)) and bias.grad.dtype == torch.float32


def test_a_transposed_gradient_keeps_its_strides_and_stays_in_the_list():
    weights = [nn.Parameter(torch.randn(2, 3)) for _ in range(2)]
    copies = packed_cast(torch.bfloat16, *weights)
    with Ops() as ops:
        torch.autograd.backward(copies, [torch.ones(3, 2, dtype=torch.bfloat16).t(), torch.ones_like(copies[1])])
    assert ops.names.count("_foreach_copy_") == 1 and "_to_copy" not in ops.names
    assert all(torch.equal(weight.grad, torch.ones(2, 3)) for weight in weights)


def test_weights_of_another_dtype_get_gradients_of_it():
    weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float64, torch.float32)]
    copies = packed_cast(torch.float16, *weights)
    sum(c.sum() for c in copies).backward()
    assert [weight.grad.dtype for weight in weights] == [torch.float64, torch.float32]


class Tagged(torch.Tensor):
    """A subclass with nothing of its own."""


def test_subclasses_are_cast_by_their_own_rule():
    weight = torch.ones(2).as_subclass(Tagged)
    with Ops() as ops:
        copies = packed_cast(torch.float16, weight, torch.ones(2))
    assert type(copies[0]) is Tagged and "_foreach_copy_" not in ops.names


def test_forward_mode(x):
    weights, tangents = (torch.randn(2, 2), torch.randn(2)), (torch.ones(2, 2), torch.ones(2))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(weights, tangents, strict=True)]
        for copied, tangent in zip(packed_cast(torch.bfloat16, *duals), tangents, strict=True):
            assert torch.equal(forward_ad.unpack_dual(copied).tangent, tangent.bfloat16())


# -------------------------------------------------------------------------------------------- training loops


def test_forward_and_gradients_equal_plain_casts(nets, x):
    assert torch.equal(nets[0](x), nets[1](x))
    for net in nets:
        net(x).square().sum().backward()
    assert_equal_grads(nets)
    assert nets[0].spare.weight.grad is None


def test_two_forwards_before_one_backward_and_gradients_add_up(nets, x):
    for net in nets:
        (net(x).sum() + net(2 * x).square().sum()).backward()
        net(x).sum().backward()
    assert_equal_grads(nets)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(nets, x, use_reentrant):
    reference = copy.deepcopy(nets[0])
    reference(x).sum().backward()
    for net in nets:
        given = x.clone().requires_grad_()
        checkpoint(net, given, use_reentrant=use_reentrant).sum().backward()
    assert_equal_grads(nets)
    assert_equal_grads((nets[0], reference))


def test_retain_graph(nets, x):
    for net in nets:
        loss = net(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal_grads(nets)


def test_double_backward(nets, x):
    for net in nets:
        given = x.clone().requires_grad_()
        penalty = torch.autograd.grad(net(given).square().sum(), given, create_graph=True)[0]
        weights = torch.autograd.grad(net(given).square().sum(), list(net.first.parameters()), create_graph=True)
        (penalty.square().sum() + sum(w.square().sum() for w in weights)).backward()
    assert_equal_grads(nets)
    assert float(nets[0].middle.weight.grad.abs().sum()) > 0


def test_a_step_between_forward_and_backward_uses_the_weights_of_the_forward(nets, x):
    inputs, expected = [], x.clone().requires_grad_()
    copy.deepcopy(nets[0])(expected).sum().backward()
    for net in nets:
        given = x.clone().requires_grad_()
        loss = net(given).sum()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0)
        loss.backward()
        inputs.append(given.grad)
    assert torch.equal(inputs[0], inputs[1]) and torch.equal(inputs[0], expected.grad)
    assert_equal_grads(nets)


def test_writes_through_data_are_seen(nets, x):
    before = nets[0](x)
    for net in nets:
        net.first.weight.data.mul_(2)
        net.head.weight.data = net.head.weight.data + 1
    assert not torch.equal(nets[0](x), before)
    assert torch.equal(nets[0](x), nets[1](x))


def test_no_decay_of_unused_and_frozen_parameters(nets, x):
    net = nets[0]
    net.first.requires_grad_(False)
    kept = {name: value.clone() for name, value in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    net(x).sum().backward()
    optimizer.step()
    changed = {name for name, value in net.named_parameters() if not torch.equal(value, kept[name])}
    assert changed == {"middle.weight", "middle.bias"}


def test_freezing_and_unfreezing_between_steps(nets, x):
    for net in nets:
        net.first.requires_grad_(False)
        net(x).sum().backward()
        net.first.requires_grad_(True)
        net.middle.weight.requires_grad_(False)
        net(x).sum().backward()
    assert_equal_grads(nets)


def test_a_model_that_is_all_frozen_gives_no_graph(nets, x):
    assert not nets[0].requires_grad_(False)(x).requires_grad


def test_hooks_on_parameters(nets, x):
    calls = []
    for net in nets:
        net.first.weight.register_hook(lambda g: calls.append(("grad", g.dtype)) or g * 2)
        net.first.weight.register_post_accumulate_grad_hook(lambda p: calls.append(("post", p.grad.dtype)))
        net(x).sum().backward()
    assert calls == [("grad", torch.float32), ("post", torch.float32)] * 2
    assert_equal_grads(nets)


class Apart(nn.Module):
    """Three layers whose gradients come back on ways of their own."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.way = way

    def forward(self, x):
        return getattr(self, self.way)(self.first(x))

    def reentrant(self, h):
        return self.last(checkpoint(self.middle, h, use_reentrant=True))

    def reentrant_twice(self, h):
        h = checkpoint(lambda h: self.middle(h) + self.last(h), h, use_reentrant=True)
        return checkpoint(self.last, h, use_reentrant=True)

    def not_reentrant(self, h):
        return self.last(checkpoint(self.middle, h, use_reentrant=False))

    def detached(self, h):
        return self.last(self.middle(h.detach()))

    def data(self, h):
        return self.last(self.middle(h.data))

    def without_gradients(self, h):
        with torch.no_grad():
            h = self.middle(h)
        return self.last(h)

    def decided(self, h):
        return self.last(h) * (self.middle(h).argmax(-1, keepdim=True) > 7)


@pytest.mark.parametrize(
    "way", ["reentrant", "reentrant_twice", "not_reentrant", "detached", "data", "without_gradients", "decided"]
)
def test_hooks_are_called_as_in_float32(way):
    """Once for each parameter that has a gradient, with it, and never with None (DDP's hooks take that for one)."""
    calls = {}
    nets = {"fp32": Apart(way), "fxamp": fxamp.convert(Apart(way), torch.bfloat16)}
    given = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for kind, net in nets.items():
        calls[kind] = found = []
        for name, parameter in net.named_parameters():
            parameter.register_hook(lambda g, name=name, found=found: found.append((name, "grad", g is None)))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, found=found: found.append((name, "post", p.grad is None))
            )
        net(given).square().sum().backward()
    without = [{name for name, p in net.named_parameters() if p.grad is None} for net in nets.values()]
    assert without[0] == without[1]
    # Of the same weight in two reentrant checkpoints eager sends the gradients one by one.
    assert sorted(calls["fxamp"]) == sorted(set(calls["fp32"]))
    assert not any(is_none for _, _, is_none in calls["fxamp"])


# -------------------------------------------------------------------------------------- torch's other callers


def test_functional_call(nets, x):
    other = {name: value.detach() + 1 for name, value in nets[0].named_parameters()}
    assert torch.equal(functional_call(nets[0], other, (x,)), functional_call(nets[1], other, (x,)))
    assert not torch.equal(functional_call(nets[0], other, (x,)), nets[0](x))


def test_vmap_over_models_and_per_sample_gradients(nets, x):
    stacked, _ = stack_module_state([nets[0], copy.deepcopy(nets[0])])
    out = vmap(lambda parameters: functional_call(nets[0], parameters, (x,)))(stacked)
    # A batched GEMM may add in another order: one step of bfloat16 (2**-8) at each of three layers of size below 1.
    assert torch.allclose(out[1], nets[0](x), rtol=0, atol=3 * 2**-8)

    def loss(parameters, sample):
        return functional_call(nets[0], parameters, (sample[None],)).sum()

    parameters = {name: value.detach() for name, value in nets[0].named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    assert found["first.weight"].shape == (3, 6, 4) and found["first.weight"].dtype == torch.float32


@pytest.mark.parametrize("pad", ["auto", "always"])
def test_batches_of_gradients(pad, x):
    torch.manual_seed(0)
    model = fxamp.convert(Net(), torch.bfloat16, example_inputs=(x,), pad=pad)
    parameters = [weight for name, weight in model.named_parameters() if "spare" not in name]
    out = model(x).sum(0)
    one_by_one = [torch.autograd.grad(value, parameters, retain_graph=True) for value in out]
    batch = torch.eye(len(out))
    found = torch.autograd.grad(out, parameters, batch, is_grads_batched=True)
    for number, expected in enumerate(one_by_one):
        torch.testing.assert_close([each[number] for each in found], [*expected], rtol=0, atol=0)


@pytest.mark.parametrize("is_called_first", [False, True])
@pytest.mark.parametrize("in_dims", [(0, None), (0, 0)])
def test_an_ensemble_of_models_with_norms(in_dims, is_called_first):
    """The numbers of a norm's weight decide whether it may be low."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)) for _ in range(3)]
    x = torch.randn(3, 5, 4)
    model = fxamp.convert(copy.deepcopy(nets[0]), torch.bfloat16, example_inputs=(x[0],))
    if is_called_first:
        model(x[0])
    stacked, _ = stack_module_state(nets)
    run = vmap(lambda state, x: functional_call(model, state, (x,)), in_dims)
    for _ in range(2):
        found = run(stacked, x if in_dims[1] == 0 else x[0])
        for number, net in enumerate(nets):
            expected = net(x[number if in_dims[1] == 0 else 0])
            assert (found[number] - expected).norm() <= 0.02 * expected.norm()


def test_an_ensemble_whose_norms_low_would_destroy():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    x = torch.randn(5, 4)
    model = fxamp.convert(copy.deepcopy(net), torch.float16, example_inputs=(x,))
    assert model(x).isfinite().all()
    state = {name: torch.stack([value, value]).detach() for name, value in net.named_parameters()}
    state["1.weight"] *= 1e6
    found = vmap(lambda state: functional_call(model, state, (x,)))(state)
    assert found.isfinite().all() and found.abs().max() > 1e5


def test_jvp_of_the_model(nets, x):
    for net in nets:
        assert torch.func.jvp(lambda t: net(t), (x,), (torch.ones_like(x),))[1].shape == (3, 6)  # noqa: B023
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangents = [forward_ad.unpack_dual(net(dual)).tangent for net in nets]
    assert torch.equal(*tangents)


def test_compile_takes_the_whole_graph_with_plain_casts(nets, x):
    seen = []

    def backend(gm, example):
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    compiled = torch.compile(nets[0], backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), nets[1](x))
    compiled(x).sum().backward()
    nets[1](x).sum().backward()
    assert_equal_grads(nets)
    assert seen.count("to") >= 3 and not any("foreach" in target or "packed" in target for target in seen)


@pytest.mark.parametrize("strict", [True, False])
def test_export(nets, x, strict):
    exported = torch.export.export(nets[0], (x,), strict=strict)
    assert torch.equal(exported.module()(x), nets[1](x))
    assert "foreach" not in str(exported.graph)


# -------------------------------------------------------------------------------------------------------- DDP


class Deep(nn.Module):
    """Eight equal layers of 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


@contextlib.contextmanager
def one_process_group():
    """Without gloo's threads: a group that is destroyed while one of them waits for Python never ends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_reduce(events, bucket):
    """Of one rank: nothing is added."""
    events.append("all-reduce")
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_ddp_starts_its_all_reduces_while_backward_runs(monkeypatch):
    """Buckets of two layers: the gradients of the last layers are sent before those of the first are computed."""
    monkeypatch.setattr(PackWeights.__init__, "__defaults__", (9 << 9,))
    model = fxamp.convert(Deep(), torch.bfloat16, example_inputs=(torch.randn(2, 32),))
    assert buckets_of(model) == 4
    events = []
    model.layers[0].weight.register_hook(lambda g: events.append("first layer"))
    with one_process_group():
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.008)
        parallel.register_comm_hook(events, all_reduce)
        for _ in range(2):  # DDP settles its buckets in the first step
            events.clear()
            parallel(torch.randn(2, 32)).sum().backward()
    assert "all-reduce" in events[: events.index("first layer")]


class WithAuxiliary(nn.Module):
    """A head that the loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.main, self.auxiliary = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = F.relu(self.trunk(x))
        return self.main(h), self.auxiliary(h)


def test_ddp_with_an_auxiliary_head_that_the_loss_leaves_out():
    model = fxamp.convert(WithAuxiliary(), torch.bfloat16, example_inputs=(torch.randn(2, 8),))
    with one_process_group():
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        parallel.register_comm_hook([], all_reduce)
        for _ in range(2):
            parallel(torch.randn(2, 8))[0].sum().backward()
    assert model.auxiliary.weight.grad is None and model.main.weight.grad is not None


def test_backward_casts_each_bucket_as_soon_as_its_layers_are_done(monkeypatch):
    monkeypatch.setattr(PackWeights.__init__, "__defaults__", (9 << 9,))
    model = fxamp.convert(Deep(), torch.bfloat16, example_inputs=(torch.randn(2, 32),))
    loss = model(torch.randn(2, 32)).sum()
    with Ops() as ops:
        loss.backward()
    casts = [n for n, name in enumerate(ops.names) if name == "_foreach_copy_"]
    gemms = [n for n, name in enumerate(ops.names) if name == "mm"]
    assert len(casts) == 4 and casts[0] < gemms[len(gemms) // 3], (casts, gemms)


# ----------------------------------------------------------------------------------------------------- freeze


def test_kept_copies_are_made_once_and_again_after_a_write():
    kept, weights = KeptCast(0), [nn.Parameter(torch.ones(2)) for _ in range(2)]
    with torch.no_grad():
        first = kept(torch.float16, *weights)
        assert kept(torch.float16, *weights)[0] is first[0]
        weights[1].add_(1)
        assert torch.equal(kept(torch.float16, *weights)[1], torch.full((2,), 2.0, dtype=torch.float16))
        weights[0].data = torch.zeros(2)
        assert torch.equal(kept(torch.float16, *weights)[0], torch.zeros(2, dtype=torch.float16))
        weights[0].data.add_(5)
        assert torch.equal(kept(torch.float16, *weights)[0], torch.zeros(2, dtype=torch.float16)), "documented"
        kept.forget()
        assert torch.equal(kept(torch.float16, *weights)[0], torch.full((2,), 5.0, dtype=torch.float16))


def test_kept_copies_are_of_these_tensors_not_of_an_address():
    """Weights that functional_call is given anew at each call come and go at one address, at version 0."""
    model = fxamp.convert(nn.Linear(64, 64, bias=False), torch.bfloat16).freeze()
    weight, x, wrong = model.weight.detach().clone(), torch.randn(4, 64), []
    with torch.no_grad():
        for factor in range(1, 20):
            found = functional_call(model, {"weight": weight * factor}, (x,))
            if not torch.allclose(found, x @ weight.t() * factor, rtol=0.02, atol=0.02 * factor):
                wrong.append(factor)
    assert not wrong


@pytest.mark.parametrize("other", [lambda w: torch.zeros_like(w), lambda w: w.t(), lambda w: w.flip(0)])
def test_kept_copies_are_made_again_where_a_weight_is_given_other_memory(other):
    """An EMA that is swapped in: the memory of before is held by somebody, and as good as it was."""
    model = fxamp.convert(nn.Linear(8, 8, bias=False), torch.bfloat16).freeze()
    x, held = torch.randn(4, 8), model.weight.data
    with torch.no_grad():
        for data in (held, other(held), held, other(held)):
            model.weight.data = data
            torch.testing.assert_close(model(x), x @ data.t(), rtol=0.02, atol=0.02)


def test_kept_copies_are_of_these_numbers_not_of_an_address():
    """Memory that a weight gave up may be handed out again, to the next `.data = ` of the same weight."""
    model = fxamp.convert(nn.Linear(64, 64, bias=False), torch.bfloat16).freeze()
    x, reused = torch.ones(1, 64), 0
    with torch.no_grad():
        for number in [*range(50)] * 10:  # bfloat16 holds them exactly
            model.weight.data = torch.full((64, 64), 2.0 * number)
            model(x)
            address = model.weight.data_ptr()
            model.weight.data = torch.zeros(64, 64)
            model.weight.data = torch.full((64, 64), 2.0 * number + 1)
            reused += model.weight.data_ptr() == address
            assert float(model(x)[0, 0]) == 64 * (2 * number + 1)
    if not reused:
        pytest.skip("the allocator handed out no memory again, so nothing was tried")


def test_copies_of_a_frozen_model_in_threads_have_their_own_weights():
    model = fxamp.convert(nn.Linear(8, 8, bias=False), torch.bfloat16).freeze()
    copies = [copy.deepcopy(model) for _ in range(4)]
    wrong: list[int] = []

    def run(number: int) -> None:
        with torch.no_grad():
            copies[number].weight.fill_(number)
            for _ in range(300):
                if float(copies[number](torch.ones(1, 8))[0, 0]) != 8 * number:
                    wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_kept_copies_give_way_to_gradients_and_inference_mode():
    kept, weight = KeptCast(0), nn.Parameter(torch.ones(2))
    with torch.inference_mode():
        kept(torch.float16, weight)
    with torch.no_grad():
        assert not kept(torch.float16, weight)[0].is_inference()
    assert kept(torch.float16, weight)[0].requires_grad


def test_a_weight_made_under_inference_mode_among_others_is_copied_at_each_call():
    """It counts no writes."""
    kept, weights = KeptCast(0), [nn.Parameter(torch.ones(2)) for _ in range(2)]
    with torch.inference_mode():
        weights[1] = nn.Parameter(torch.ones(2), requires_grad=False)
        for number in (1.0, 2.0):
            weights[1].fill_(number)
            assert torch.equal(kept(torch.float16, *weights)[1], torch.full((2,), number, dtype=torch.float16))


def test_a_recorded_graph_keeps_nothing(monkeypatch):
    """It would fill copies at its replays alone, or read those that a later call lets go of."""
    kept, weight = KeptCast(0), nn.Parameter(torch.ones(2))
    with torch.no_grad():
        monkeypatch.setattr(recorded, "is_capturing", lambda device: True)
        noted = kept(torch.float16, weight)[0]
        monkeypatch.undo()
        outside = kept(torch.float16, weight)[0]
        monkeypatch.setattr(recorded, "is_capturing", lambda device: True)
        assert noted is not outside and kept(torch.float16, weight)[0] is not outside
        monkeypatch.undo()
        assert kept(torch.float16, weight)[0] is outside


class Stream:
    """Of a GPU, by number; notes what is asked of it."""

    log: tuple = ()

    def __init__(self, number):
        self.cuda_stream = number

    def record_event(self):
        self.log.append(("record", self.cuda_stream))
        return f"event of {self.cuda_stream}"

    def wait_event(self, event):
        self.log.append(("wait", self.cuda_stream, event))


def test_another_stream_waits_once_for_the_copies_that_it_reads(monkeypatch):
    """Threads that serve one frozen model have streams of their own."""
    monkeypatch.setattr(Stream, "log", [])
    current = [1]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(current[0]))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, s: Stream.log.append(("use", s.cuda_stream)))
    monkeypatch.setattr("fxamp.runtime.packed_weights.made_on", MadeOn)
    kept, weights = KeptCast(0), [nn.Parameter(torch.ones(2)) for _ in range(2)]
    with torch.no_grad():
        first = kept(torch.float16, *weights)
        for current[0] in (1, 2, 2, 1):
            assert kept(torch.float16, *weights) is first
        assert Stream.log == [("record", 1), ("wait", 2, "event of 1"), ("use", 2), ("use", 2)]
        weights[0].add_(1)
        current[0] = 2
        kept(torch.float16, *weights)
        assert Stream.log[4:] == [("record", 2)]


# -------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_frozen_model_sees_new_weights_in_a_recorded_graph():
    model = fxamp.convert(nn.Linear(64, 64, bias=False).cuda(), torch.float16).freeze()
    x, graph, side = torch.randn(8, 64, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            found = model(x)
        for factor in (1.0, 2.0):
            model.weight.mul_(factor)
            other = model(x)
            graph.replay()
            torch.testing.assert_close(found, other, rtol=2**-8, atol=2**-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_bucket_is_few_kernels_each_way():
    """A multi-tensor kernel takes a few dozen tensors; channels-last weights stay in it."""
    weights = [nn.Parameter(torch.randn(16, 8, 3, 3, device="cuda")) for _ in range(40)]
    weights += [nn.Parameter(torch.randn(8, 8, 3, 3, device="cuda").to(memory_format=torch.channels_last))]
    grads = [torch.ones_like(weight, dtype=torch.float16) for weight in weights]
    packed_cast(torch.float16, *weights)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        torch.autograd.backward(packed_cast(torch.float16, *weights), grads)
        torch.cuda.synchronize()
    kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) <= 6, [event.name for event in kernels]

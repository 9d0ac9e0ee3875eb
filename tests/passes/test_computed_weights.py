"""Weights that a weight norm computes are cast by one copy, too, with the numbers and gradients of single casts."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp import ir
from fxamp.counting.counts import count_step
from fxamp.errors import InvariantError
from fxamp.model.engine import engine_of
from fxamp.passes.pack import PackWeights, packs_sound
from fxamp.runtime.packed_weights import packed_cast
from tests.language import BF16, FP16
from tests.passes.test_pack import pack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.nn.utils import weight_norm as old_weight_norm

new_weight_norm = nn.utils.parametrizations.weight_norm


def old(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return old_weight_norm(module)


class Net(nn.Module):
    """Three normed convolutions and a head; `around` runs the second."""

    def __init__(self, norm=new_weight_norm, around=lambda function, x: function(x)):
        super().__init__()
        self.first, self.second = norm(nn.Conv1d(4, 8, 3)), norm(nn.Conv1d(8, 16, 3))
        self.third, self.head = norm(nn.Conv1d(16, 8, 1)), nn.Linear(8, 4)
        self.around = around

    def forward(self, x):
        h = self.around(lambda h: self.second(h.relu()), self.first(x))
        return self.head(self.third(h.relu()).mean(-1))


X = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))


def made(build=Net, **options):
    torch.manual_seed(0)
    return fxamp.convert(build(), **{"dtype": BF16, "example_inputs": (X,), **options})


def with_single_casts(build=Net, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackWeights, "apply", lambda self, graph: False)
        return made(build, **options)


def buckets(model):
    """The ops of what each copy of a bucket is made of."""
    (variant,) = engine_of(model).all_variants()
    packed = [node for node in variant.graph.nodes if node.target is packed_cast]
    return [[ir.mark(read).op for read in node.all_input_nodes] for node in packed]


def norms_among(model):
    return [bucket for bucket in buckets(model) if "_weight_norm" in bucket]


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("norm", [new_weight_norm, old])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_three_normed_weights_are_one_copy_with_the_same_numbers(dtype, norm, opt_level):
    options = {"dtype": dtype, "opt_level": opt_level, "build": lambda: Net(norm)}
    model, plain = made(**options), with_single_casts(**options)
    assert norms_among(model) == [["_weight_norm"] * 3] and not buckets(plain)
    assert fxamp.report(model).casts == fxamp.report(plain).casts, "tensors that are cast are as many"
    optimizers = [fxamp.MasterWeightOptimizer(torch.optim.SGD(m.parameters(), 0.1)) for m in (model, plain)]
    for _ in range(3):
        results = [m(X) for m in (model, plain)]
        torch.testing.assert_close(*results, rtol=0, atol=0)
        for result, optimizer in zip(results, optimizers, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
        assert_same(grads_of(model), grads_of(plain))
        for optimizer in optimizers:
            optimizer.step()
    assert_same(model.state_dict(), plain.state_dict())


def test_a_step_launches_fewer_casts():
    counts = [count_step(lambda m=m: m(X).sum(), list(m.parameters())) for m in (made(), with_single_casts())]
    packed, single = counts
    assert packed.tensors_cast == single.tensors_cast and packed.nbytes == single.nbytes
    assert packed.saved_nbytes == single.saved_nbytes
    # 3 weights and 4 biases and a head's weight: two copies for eight, each way
    assert single.casts - packed.casts == 2 * (8 - 2)


def test_two_forwards_may_precede_a_backward_and_a_step_a_backward():
    model, plain = made(), with_single_casts()
    for each in (model, plain):
        first, second = each(X), each(2 * X)
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.data.mul_(1.5)  # a forward's weights are those of its backward
        (second.sum() + first.square().sum()).backward(retain_graph=True)
        first.sum().backward()
    assert_same(grads_of(model), grads_of(plain))
    torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0)


def test_gradients_may_be_differentiated():
    model, plain = made(), with_single_casts()
    for each in (model, plain):
        x = X.clone().requires_grad_()
        (given,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        given.square().sum().backward()
    assert_same(grads_of(model), grads_of(plain))


def test_frozen_and_unused_weights_have_no_gradient():
    class TwoHeads(Net):
        def __init__(self):
            super().__init__()
            self.other = new_weight_norm(nn.Conv1d(8, 2, 1))

        def forward(self, x):
            h = self.first(x)
            return self.third(self.second(h)), self.other(h)

    model = made(TwoHeads)
    assert sorted(map(len, norms_among(model))) == [2], "what reaches one output alone stands apart"
    model.second.parametrizations.weight.original1.requires_grad_(False)
    model(X)[0].sum().backward()
    grads = grads_of(model)
    assert {name for name, grad in grads.items() if grad is None} == {
        "second.parametrizations.weight.original1",
        *(name for name in grads if name.startswith(("other", "head"))),
    }


def normed(module):
    """The weight that a weight norm makes, by itself."""
    parts = module.parametrizations.weight
    return torch._weight_norm(parts.original1, parts.original0, 0)


class AllInside(Net):
    reentrant = False

    def forward(self, x):
        def inside(h):
            return self.third(self.second(h))

        return checkpoint(inside, self.first(x), use_reentrant=self.reentrant)


class AllInsideOfAReentrantOne(AllInside):
    reentrant = True


class ReadInside(Net):
    def forward(self, x):
        second = normed(self.second)

        def inside(h):
            return torch.conv1d(torch.conv1d(h, second), normed(self.third))

        return checkpoint(inside, self.first(x), use_reentrant=False)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("build", [AllInside, AllInsideOfAReentrantOne, ReadInside])
def test_what_a_checkpointed_region_alone_reads_has_its_bucket(build, opt_level):
    model, plain = (make(build, opt_level=opt_level) for make in (made, with_single_casts))
    assert norms_among(model) == [["_weight_norm"] * 2], "the third is not read there"
    counts = [count_step(lambda m=m: m(X).sum(), list(m.parameters())) for m in (model, plain)]
    packed, single = counts
    assert packed.nbytes == single.nbytes and packed.saved_nbytes == single.saved_nbytes
    assert packed.casts < single.casts
    for each in (model, plain):
        each.zero_grad()
        each(X).sum().backward()
    assert_same(grads_of(model), grads_of(plain))


def test_what_a_region_computes_for_others_keeps_its_cast():
    class GivenOut(Net):
        def forward(self, x):
            h = self.first(x)
            for module in (self.second, self.third):
                h, weight = checkpoint(lambda h, m=module: (h.sin(), normed(m)), h, use_reentrant=False)
                h = torch.conv1d(h, weight)
            return h

    model, plain = made(GivenOut), with_single_casts(GivenOut)
    assert not norms_among(model)
    counts = [count_step(lambda m=m: m(X).sum(), list(m.parameters())) for m in (model, plain)]
    assert counts[0].nbytes == counts[1].nbytes, "no more is computed again"
    for each in (model, plain):
        each.zero_grad()
        each(X).sum().backward()
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("copies", ["inside", "outside"])
def test_what_no_grad_computes_has_no_gradient(copies):
    class Some(Net):
        def forward(self, x):
            h = self.first(x)
            with torch.no_grad():
                second, third = normed(self.second), normed(self.third)
                shift = torch.conv1d(torch.conv1d(h, second), third).mean() if copies == "inside" else 0
            return torch.conv1d(torch.conv1d(h, second), third) + shift

    model, plain = made(Some), with_single_casts(Some)
    assert norms_among(model) == [["_weight_norm"] * 2] * (2 if copies == "inside" else 1)
    for each in (model, plain):
        each(X).sum().backward()
    grads = grads_of(model)
    assert_same(grads, grads_of(plain))
    assert {name.split(".")[0] for name, grad in grads.items() if grad is not None} == {"first"}


@pytest.mark.parametrize("way", ["no_grad", "data"])
def test_weights_that_are_written_in_forward_keep_their_casts(way):
    class Written(Net):
        def forward(self, x):
            h = self.second(self.first(x))
            magnitude = self.third.parametrizations.weight.original0
            if way == "data":
                magnitude.data.mul_(2)
            else:
                with torch.no_grad():
                    magnitude.mul_(2)
            return self.third(h).sum()

    model, plain = made(Written), with_single_casts(Written)
    assert norms_among(model) == [["_weight_norm"] * 2]
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0)
    assert_same(model.state_dict(), plain.state_dict())


def test_normed_weights_that_are_written_keep_their_casts():
    class Written(Net):
        def forward(self, x):
            weights = [normed(module) for module in (self.first, self.second, self.third)]
            h = torch.conv1d(x, weights[0])
            weights[1].data.mul_(2)
            return torch.conv1d(torch.conv1d(h, weights[1]), weights[2]).sum()

    model, plain = made(Written), with_single_casts(Written)
    assert norms_among(model) == [["_weight_norm"] * 2]
    torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0)


def test_copies_to_float32_of_norms_that_run_low_stay_alone():
    class Wide(Net):
        def forward(self, x):
            first, second, third = (normed(module) for module in (self.first, self.second, self.third))
            h = torch.conv1d(torch.conv1d(torch.conv1d(x, first), second), third)
            return h.sum() + sum(weight.exp().sum() for weight in (first, second, third))

    low_norms = {"opt_level": "O2", "lists": fxamp.OpLists.default().override(allow=["_weight_norm"])}
    model, plain = made(Wide, **low_norms), with_single_casts(Wide, **low_norms)
    assert not buckets(model)
    torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0)


def test_frozen_models_compute_them_at_each_call():
    model, plain = made(), with_single_casts()
    model.eval().freeze(), plain.eval()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0)
            for each in (model, plain):
                each.third.parametrizations.weight.original0.data.mul_(2)  # of a kept copy this would not be seen
    assert norms_among(model) == [["_weight_norm"] * 3], "kept copies of what is computed anew would be made anew, too"


@pytest.mark.parametrize("how", ["functional_call", "compile", "vmap", "inference_mode"])
def test_transforms_see_plain_casts(how):
    model, plain = made(), with_single_casts()
    torch._dynamo.reset()
    if how == "functional_call":
        weights = {name: 2 * p.detach() for name, p in model.named_parameters()}
        found, expected = (torch.func.functional_call(m, weights, (X,)) for m in (model, plain))
    elif how == "compile":
        found, expected = torch.compile(model, backend="aot_eager")(X), plain(X)
    elif how == "vmap":
        found, expected = (torch.func.vmap(m)(torch.stack((X, 2 * X))) for m in (model, plain))
    else:
        with torch.inference_mode():
            found, expected = model(X), plain(X)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_bucket_is_no_larger_than_others():
    sizes = {
        limit: [len(bucket) for bucket in pack(lambda m, x: m(x), Net(), X, limit=limit)]
        for limit in (25 << 20, 2 * (8 * 4 * 3 + 16 * 8 * 3))
    }
    assert sizes == {25 << 20: [3, 5], 2 * (8 * 4 * 3 + 16 * 8 * 3): [2, 5]}, "the third does not fit, and stays alone"


def test_the_invariant_sees_computed_weights_among_parameters():
    (variant,) = engine_of(made()).all_variants()
    graph = copy.deepcopy(variant.graph)
    packed = graph.find_nodes(op="call_function", target=packed_cast)
    (of_norms,) = [node for node in packed if ir.mark(node.args[1]).op == "_weight_norm"]
    parameter = of_norms.args[1].all_input_nodes[0]
    of_norms.args = (*of_norms.args, parameter)
    with pytest.raises(InvariantError, match="casts parameters and computed weights together"):
        packs_sound(graph)


def test_weights_that_hang_on_the_input_keep_their_casts():
    class Scaled(Net):
        def forward(self, x):
            h, scale = self.first(x), x.mean()
            norms = [module.parametrizations.weight for module in (self.second, self.third)]
            second, third = (torch._weight_norm(each.original1, each.original0 * scale, 0) for each in norms)
            return torch.conv1d(torch.conv1d(h, second), third)

    model, plain = made(Scaled), with_single_casts(Scaled)
    assert not norms_among(model), "the one that is left stays alone"
    torch.testing.assert_close(model(X), plain(X), rtol=0, atol=0)

"""Checkpointed regions: computed again with the same random numbers, in low precision, with every gradient."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxamp
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def keep_products(ctx, op, *args, **kwargs):
    keeps = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_products)


class Block(nn.Module):
    def __init__(self, nested=False, **options):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.4)
        self.nested, self.options = nested, options

    def inner(self, x, shift):
        return self.drop(torch.exp(-F.gelu(self.first(x)).square())), x + shift

    def outer(self, x, shift):
        if self.nested:
            y, z = checkpoint(self.inner, x, shift, use_reentrant=False)
        else:
            y, z = self.inner(x, shift)
        return self.drop(self.second(y)), z

    def forward(self, x):
        x = self.drop(x)
        y, z = checkpoint(self.outer, x, 1.0, use_reentrant=False, **self.options)
        return self.last(y) + z[:, :4]


def gradients(run, model):
    model.zero_grad()
    torch.manual_seed(5)
    run(X).square().sum().backward()
    return [weight.grad.clone() for weight in model.parameters()]


WAYS = {
    "convert": lambda model, **rest: fxamp.convert(model, LOW, capture="dynamo", **rest),
    "eager": lambda model, **rest: torch.compile(
        model, backend="fxamp", options={"dtype": LOW, "inner": "eager", **rest}
    ),
    "aot_eager": lambda model, **rest: torch.compile(
        model, backend="fxamp", options={"dtype": LOW, "inner": "aot_eager", **rest}
    ),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"nested": True}, {"preserve_rng_state": True}, {"context_fn": SELECTIVE}],
    ids=["plain", "nested", "preserve", "selective"],
)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_same_random_numbers(way, options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Block(**options)
    expected = gradients(model, model)
    twin = copy.deepcopy(model)
    for exact, found in zip(expected, gradients(WAYS[way](twin, overrides={"**": "deny"}), twin), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    for exact, found in zip(expected, gradients(WAYS[way](twin), twin), strict=True):
        assert (found - exact).norm() <= 0.05 * exact.norm()


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "_checkpoint_impl"), reason="no decorator before torch 2.14")
@pytest.mark.parametrize("way", [*WAYS, "symbolic", "auto"])
def test_a_decorated_function_is_computed_again_as_it_ran(way):
    class Decorated(Block):
        @checkpoint(use_reentrant=False)
        def outer(self, x, shift):
            return super().outer(x, shift)

        def forward(self, x):
            y, z = self.outer(self.drop(x), shift=1.0)
            return self.last(y) + z[:, :4]

    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Decorated()
    expected = gradients(model, model)
    capture = {"capture": way} if way in ("symbolic", "auto") else {}
    converted = WAYS.get(way, fxamp.convert)(model, **({"dtype": LOW, **capture} if capture else {}))
    for _ in range(2):
        for found, plain in zip(gradients(converted, model), expected, strict=True):
            assert (found - plain).norm() <= 0.05 * plain.norm()


@pytest.mark.parametrize(("options", "products"), [({}, 2), ({"nested": True}, 2), ({"context_fn": SELECTIVE}, 1)])
def test_the_region_is_low_and_computed_again_in_backward(options, products):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Block(**options)
    converted = WAYS["convert"](model)
    converted(X)
    rows = [row for row in fxamp.report(converted).rows if row.op == "linear"]
    assert [row.precision for row in rows] == ["low"] * 3
    variant = engine_of(converted).graphs()[0]
    seen = []
    engine_of(converted).otherwise.watch = lambda _, inputs: (seen.append(inputs), variant.compiled.run(None, *inputs))[
        1
    ]
    converted(X)
    with Count() as forward:
        result = variant.compiled.run(None, *seen[0])
    loss = sum(value.sum() for value in result)
    with Count() as backward:
        loss.backward()
    assert forward.calls.count("aten.exp.default") == backward.calls.count("aten.exp.default") == 1
    again = backward.calls.count("aten.addmm.default")
    assert forward.calls.count("aten.addmm.default") == 3
    assert again == (2 if products == 2 else 0)


def test_one_region_of_one_op_between_writes():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("count", torch.ones(8))

        def forward(self, x):
            y = checkpoint(F.gelu, self.fc(x) + self.count, use_reentrant=False)
            self.count.add_(1)
            return y + self.count

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Counts()
    twin = copy.deepcopy(model)
    converted = WAYS["convert"](twin, overrides={"**": "deny"})
    for _ in range(2):
        assert torch.equal(converted(X), model(X))
    assert torch.equal(model.count, twin.count)


def item(y):
    y[:, 0] = 1.0
    return y


def item_added(y):
    y[:, 0] += 1.0
    return y


def added(y):
    before = y
    y += 1
    return y + before


def view_added(y):
    part = y[:, 1:3]
    part *= 2
    return y


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("write", [item, item_added, added, view_added])
def test_what_a_region_returns_may_be_written(write, is_exact, capture):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def inner(self, x):
            return self.first(x) * 2, 2.0

        def forward(self, x):
            y, number = checkpoint(self.inner, x.tanh(), use_reentrant=False)
            old = number
            number += 1
            return self.last(write(y)) * number + old

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Writes()
    twin = copy.deepcopy(model)
    converted = fxamp.convert(twin, LOW, capture=capture, overrides={"**": "deny"} if is_exact else None)
    near = {"rtol": 1e-6, "atol": 1e-6} if is_exact else {"rtol": 0.05, "atol": 0.2}
    for _ in range(2):
        torch.testing.assert_close(converted(X), model(X), **near)
    if is_exact:
        torch.testing.assert_close(gradients(converted, twin), gradients(model, model), **near)


class Modes(nn.Module):
    """Gradients switched off before, inside, after and around a checkpointed region."""

    def __init__(self, where, reentrant=False):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.where, self.reentrant = where, reentrant

    def scale(self, x):
        with torch.no_grad():
            return torch.cos(x.mean(0))

    def inner(self, x, scale):
        y = torch.tanh(self.block(x))
        return y * (scale if "inside" not in self.where else self.scale(y))

    def forward(self, x):
        x = self.first(x)
        scale = self.scale(x) if "before" in self.where else 2.0
        if "around" in self.where:
            with torch.no_grad():
                y = checkpoint(self.inner, x, scale, use_reentrant=self.reentrant)
        else:
            y = checkpoint(self.inner, x, scale, use_reentrant=self.reentrant)
        return self.last(y if "after" not in self.where else y * self.scale(y)) + self.last(x)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["before", "inside", "after", "around", "before inside after", "before after around"])
def test_regions_without_gradients_beside_a_checkpoint_keep_every_gradient(where, reentrant, capture):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Modes(where, reentrant)
    result = model(X)
    result.square().sum().backward()
    expected = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    for low in (False, True):
        options = {} if low else {"overrides": {"**": "deny"}}
        twin = copy.deepcopy(model)
        converted = fxamp.convert(twin, LOW, capture=capture, **options)
        found = converted(X)
        found.square().sum().backward()
        for exact, weight in zip(expected, twin.parameters(), strict=True):
            assert (exact is None) == (weight.grad is None)
            if exact is not None:
                assert (weight.grad - exact).norm() <= (0.05 if low else 1e-6) * exact.norm()


def test_a_mode_that_a_checkpointed_function_leaves_changed_is_refused():
    class Leaves(nn.Linear):
        def forward(self, x):
            def function(x):
                torch.set_grad_enabled(False)
                return x * 2

            return checkpoint(function, super().forward(x), use_reentrant=False)

    try:
        with pytest.raises(fxamp.errors.CaptureError, match="leaves the gradient mode changed"):
            fxamp.convert(Leaves(8, 8), LOW, example_inputs=(X,), capture="symbolic")
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_decoders_that_turn_gradients_off_for_positions_train_all_their_weights(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable()
    model.train()
    tokens = torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    converted = fxamp.convert(model, LOW)
    converted(input_ids=tokens, labels=tokens).loss.backward()
    for name, weight in converted.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad - expected[name]).norm() <= 0.1 * expected[name].norm(), name


class Stateful(nn.Module):
    """A region that writes buffers, or reads one that is written later."""

    def __init__(self, write):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8) if write == "norm" else nn.Identity()
        self.register_buffer("count", torch.ones(()))
        self.write = write

    def inner(self, x):
        if self.write == "inside":
            self.count.add_(1)
        return torch.tanh(self.norm(x)) * (self.count + 1)

    def forward(self, x):
        y = checkpoint(self.inner, self.first(x), use_reentrant=False)
        if self.write == "afterwards":
            self.count.add_(1)
        return self.last(y)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("write", ["norm", "inside", "afterwards"])
def test_buffers_that_are_written_do_not_stop_the_recomputation(write, capture):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stateful(write)
    twin = copy.deepcopy(model)
    converted = fxamp.convert(twin, LOW, capture=capture, overrides={"**": "deny"})
    for _ in range(2):
        expected, found = gradients(model, model), gradients(converted, twin)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(dict(twin.named_buffers()), dict(model.named_buffers()), rtol=1e-6, atol=1e-6)


def offloaded(run, x):
    """A call whose saved tensors wait outside of torch, as offloading hooks keep them."""
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.detach().numpy(), torch.from_numpy):
        return run(x)


# The first call makes the graphs, and what that saves for backward is none of the user's hooks' business.
AROUND = {"checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=False), "offloading": offloaded}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_call_may_stand_under_hooks_on_saved_tensors(way, around):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    expected, twin = gradients(model, model), copy.deepcopy(model)
    run = WAYS[way](twin, overrides={"**": "deny"})
    for _ in range(2):
        found = gradients(lambda x: AROUND[around](run, x), twin)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Stack(nn.Module):
    """Blocks whose weights are larger than their activations; the adapters of frozen ones are trained."""

    def __init__(self, is_frozen, **options):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)) for _ in range(4)]
        )
        self.blocks.requires_grad_(not is_frozen)
        self.adapters = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.options = options

    def run(self, block, adapter, x):
        return x + block(x) + adapter(x)

    def forward(self, x):
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = checkpoint(self.run, block, adapter, x, **self.options) if self.options else self.run(block, adapter, x)
        return x


def kept_and_gradients(model, run, x):
    """Bytes that a forward keeps for its backward, beside the parameters; and the gradients."""
    own, kept = {weight.untyped_storage()._cdata for weight in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run(x).float().square().mean()
    size = sum(kept.values())
    loss.backward()
    return size, {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_low_copies_of_a_regions_weights_are_not_kept(level, reentrant, is_frozen):
    def made(**options):
        torch.manual_seed(0)
        return Stack(is_frozen, **options)

    x = torch.randn(2, 64, requires_grad=True)
    _, exact = kept_and_gradients(plain := made(), plain, x)
    model = made(use_reentrant=reentrant)
    with torch.autocast("cpu", LOW):
        theirs, _ = kept_and_gradients(model, model, x)
    converted = fxamp.convert(made(use_reentrant=reentrant), LOW, opt_level=level)
    for _ in range(2):
        converted.zero_grad()
        ours, found = kept_and_gradients(converted, converted, x)
    assert ours <= 1.2 * theirs, "no more than autocast keeps"
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() < 0.02 * gradient.norm(), name

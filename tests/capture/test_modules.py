"""Modules and functions that hide GEMMs or state: recurrent layers, attention, custom functions, checkpoints."""

import copy
import inspect
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
# Values of these small models are below 4 in magnitude; a few roundings to 8 bits.
ATOL = 2**-5


class Body(nn.Module):
    """A module and what is done with it."""

    def __init__(self, module, body=None) -> None:
        super().__init__()
        self.module = module
        self.body = body or (lambda module, *args: module(*args))


class One(Body):
    def forward(self, x):
        return self.body(self.module, x)


class Two(Body):
    def forward(self, x, y):
        return self.body(self.module, x, y)


def floats(result) -> list[torch.Tensor]:
    if isinstance(result, PackedSequence):
        result = tuple(result)
    return [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor) and v.is_floating_point()]


def rows(converted, *ops):
    return [row for row in fxamp.report(converted).rows if row.op in ops]


def check(model, *inputs, ops=(), low=True, example=True, mode=True):
    """Converted and eager agree within bf16, forward and backward; the named ops run low, or high."""
    model.train(mode)
    eager = copy.deepcopy(model)
    converted = fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=inputs if example else None)
    torch.manual_seed(3)
    ours = converted(*inputs)
    torch.manual_seed(3)
    theirs = eager(*inputs)
    assert type(ours) is type(theirs)
    for one, other in zip(floats(ours), floats(theirs), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=ATOL)
    sum(value.square().sum() for value in floats(ours)).backward()
    sum(value.square().sum() for value in floats(theirs)).backward()
    largest = max(float(other.grad.abs().max()) for other in eager.parameters() if other.grad is not None)
    for (name, mine), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if other.grad is not None:  # a sum of signed terms as large as the largest gradient
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=2**-5 * largest)
    assert {row.precision for row in rows(converted, *ops)} == ({"low" if low else "high"} if ops else set())
    return converted


def seeded(cls, *args, **kwargs):
    torch.manual_seed(0)
    return cls(*args, **kwargs)


X = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
KERNEL = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}
SEQUENCES = pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])


@SEQUENCES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "num_layers": 2},
        {"batch_first": True, "bias": False},
        {"num_layers": 2, "dropout": 0.5},
    ],
)
def test_recurrent_layers_run_low(cls, options):
    converted = check(One(seeded(cls, 8, 6, **options)), X, ops=(KERNEL[cls],))
    assert converted(torch.randn(7, 2, 8))[0].shape[:2] == (7, 2)
    assert len(engine_of(converted).all_variants()) == 1  # no decision has bound it to a shape


@SEQUENCES
def test_recurrent_layers_without_example_unbatched_and_as_root(cls):
    check(One(seeded(cls, 8, 6)), X, ops=(KERNEL[cls],), example=False)
    check(One(seeded(cls, 8, 6)), X[:, 0], ops=(KERNEL[cls],))
    check(seeded(cls, 8, 6), X, ops=(KERNEL[cls],))


def test_relu_rnn_and_projections():
    check(One(seeded(nn.RNN, 8, 6, nonlinearity="relu")), X, ops=("rnn_relu",))
    check(One(seeded(nn.LSTM, 8, 6, proj_size=3)), X, ops=("lstm",))


@SEQUENCES
def test_initial_states_are_read_low(cls):
    state = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1))
    body = lambda m, x, h: m(x, (h, h) if cls is nn.LSTM else h)  # noqa: E731
    check(Two(seeded(cls, 8, 6), body), X, state, ops=(KERNEL[cls],))


@SEQUENCES
def test_initial_states_that_nobody_gives_need_no_cast(cls):
    converted = check(One(seeded(cls, 8, 6)), X)
    graph = engine_of(converted).all_variants()[0].graph
    zeros = [node for node in graph.nodes if node.target == "new_zeros"]
    assert zeros
    assert all(user.target != "to" for node in zeros for user in node.users)


@SEQUENCES
def test_packed_sequences_between_pack_and_pad(cls):
    def body(module, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, hidden = module(packed)
        return pad_packed_sequence(out, total_length=x.size(0))[0], hidden

    lengths = torch.tensor([3, 5, 1, 2])
    converted = check(Two(seeded(cls, 8, 6, 2, bidirectional=True), body), X, lengths, ops=(KERNEL[cls],))
    eager = copy.deepcopy(converted.module)
    other = torch.tensor([5, 1, 1, 4])
    torch.testing.assert_close(converted(X, other)[0], body(eager, X, other)[0], rtol=0, atol=ATOL)
    assert len(engine_of(converted).all_variants()) == 1


@SEQUENCES
def test_a_layer_behind_a_packed_one_runs_low(cls):
    def body(modules, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        h, _ = pad_packed_sequence(modules[0](packed)[0])
        return modules[1](h + 1)[0]

    torch.manual_seed(0)
    model = Two(nn.ModuleList([cls(8, 6), cls(6, 6)]), body)
    converted = check(model, X, torch.tensor([5, 4, 2, 2]), ops=(KERNEL[cls],))
    assert len(rows(converted, KERNEL[cls])) == 2


def test_packed_sequences_as_argument_and_result():
    packed = pack_sequence([X[:5, 0], X[:3, 1]])
    converted = check(One(seeded(nn.LSTM, 8, 6), lambda m, p: m(p)[0]), packed, ops=("lstm",))
    assert isinstance(converted(packed), PackedSequence)
    assert converted(packed).data.dtype == torch.float32


@pytest.mark.parametrize(
    ("cls", "op"), [(nn.LSTMCell, "lstm_cell"), (nn.GRUCell, "gru_cell"), (nn.RNNCell, "rnn_tanh_cell")]
)
def test_cells_run_low_step_by_step(cls, op):
    check(One(seeded(cls, 8, 8), lambda m, x: m(x[1], m(x[0]))), X, ops=(op,))
    check(One(seeded(cls, 8, 8)), X[0], ops=(op,), example=False)
    check(One(seeded(cls, 8, 8)), X[0, 0], ops=(op,))


def test_a_subclass_with_its_own_forward_stays_whole():
    class Loud(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0] * 2

    converted = check(One(seeded(Loud, 8, 6)), X, ops=("lstm",), low=False)
    assert "inside the module" in rows(converted, "lstm")[0].reason


def test_a_hook_on_a_recurrent_layer_leaves_it_outside_and_fires():
    seen = []
    model = One(seeded(nn.LSTM, 8, 6))
    model.module.register_forward_hook(lambda *_: seen.append("lstm"))
    converted = fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=(X,))
    assert not seen
    converted(X)
    assert seen == ["lstm"]
    assert [row.precision for row in rows(converted, "lstm")] == ["high"]


def test_replaced_recurrent_weights_are_seen():
    model = One(seeded(nn.LSTM, 8, 6))
    converted = fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=(X,))
    zeros = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    assert not torch.func.functional_call(converted, zeros, (X,))[0].any()
    model.module.weight_hh_l0 = nn.Parameter(torch.zeros(24, 6))
    assert not torch.equal(converted(X)[0], fxamp.convert(One(seeded(nn.LSTM, 8, 6)), dtype=LOW)(X)[0])


# ------------------------------------------------------------------------------------------------- attention

B = X.transpose(0, 1).contiguous()
LATER = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.arange(5) >= torch.tensor([5, 3, 5, 4])[:, None]
MHA = "multi_head_attention_forward"


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8, "vdim": 8}]
)
@pytest.mark.parametrize("mode", [True, False])
def test_multihead_attention_and_its_masks(options, mode):
    model = lambda body: Two(seeded(nn.MultiheadAttention, 8, 2, batch_first=True, **options), body)  # noqa: E731
    check(model(lambda m, x, p: m(x, x, x, key_padding_mask=p)), B, PADDING, ops=(MHA,), mode=mode)
    check(
        model(lambda m, x, p: m(x, x, x, key_padding_mask=p, attn_mask=LATER < 0, average_attn_weights=False)),
        B, PADDING, ops=(MHA,), mode=mode,
    )  # fmt: skip
    check(model(lambda m, x, p: m(x, x, x, attn_mask=p, need_weights=False)[0]), B, LATER, ops=(MHA,), mode=mode)


def test_attention_to_other_sequences_and_without_batch():
    model = Two(seeded(nn.MultiheadAttention, 8, 2, kdim=6, vdim=6), lambda m, x, y: m(x, y, y))
    check(model, X, torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(2)), ops=(MHA,))
    check(One(seeded(nn.MultiheadAttention, 8, 2), lambda m, x: m(x, x, x)), X[:, 0], ops=(MHA,))
    check(One(seeded(nn.MultiheadAttention, 8, 2), lambda m, x: m(x, x, x)), X, ops=(MHA,), example=False)


def test_attention_without_weights_returns_none():
    model = One(seeded(nn.MultiheadAttention, 8, 2), lambda m, x: m(x, x, x, need_weights=False))
    assert fxamp.convert(model, dtype=LOW)(X)[1] is None


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_encoder_in_eval_takes_no_fused_path(batch_first):
    layer = seeded(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    model = Two(encoder, lambda m, x, p: m(x, src_key_padding_mask=p))
    converted = check(model, B if batch_first else X, PADDING, ops=(MHA, "linear"), mode=False)
    assert torch.backends.mha.get_fastpath_enabled()
    # under no_grad eager takes its nested path; where a token is not padding the values are the same
    with torch.no_grad():
        ours = converted(B if batch_first else X, PADDING)
        theirs = model(B if batch_first else X, PADDING)
    kept = ~(PADDING if batch_first else PADDING.T)
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=0, atol=ATOL)


@pytest.mark.parametrize("example", [True, False])
def test_the_whole_transformer(example):
    model = Two(
        seeded(nn.Transformer, 8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda m, x, p: m(x, x, tgt_mask=LATER, src_key_padding_mask=p, memory_key_padding_mask=p),
    )
    converted = check(model, B, PADDING, ops=(MHA, "linear"), example=example)
    assert not engine_of(converted).all_variants()[0].captured.decisions


def test_scaled_dot_product_attention_reads_one_dtype():
    def body(module, x, mask):
        q, k, v = module(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q.exp(), k, v, attn_mask=mask)

    check(Two(seeded(nn.Linear, 8, 24), body), B, LATER, ops=("scaled_dot_product_attention",))


def test_hand_written_attention():
    def body(module, x, mask):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in module(x).split(8, -1))
        scores = (q @ k.transpose(-2, -1)) / 2 + mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    check(Two(seeded(nn.Linear, 8, 24), body), B, LATER, ops=("linear", "matmul"))


def test_bilinear():
    check(Two(seeded(nn.Bilinear, 8, 8, 4)), X / 4, X / 4, ops=("bilinear",))


# ------------------------------------------------------------------------------------------ custom functions


class Scale(torch.autograd.Function):
    """Doubles; its gradient is deliberately a different one."""

    @staticmethod
    def forward(ctx, x, factor):
        assert x.dtype == torch.float32
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 100, None


scale = Scale.apply


@torch.library.custom_op("fxamp_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32
    return x * 3


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, gradient: gradient * 3)


@torch.fx.wrap
def opaque(x):
    return x * 2 if float(x.detach().sum()) > -1e30 else x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: Scale.apply(x, 2.0), f"{__name__}.Scale"),
        (lambda x: scale(x, 2.0), f"{__name__}.Scale"),
        (lambda x: triple(x), "fxamp_tests::triple"),
        (lambda x: torch.ops.fxamp_tests.triple(x), "fxamp_tests::triple"),
        (lambda x: opaque(x), f"{__name__}.opaque"),
    ],
)
def test_unlisted_functions_are_one_node_in_fp32(function, name):
    check(One(seeded(nn.Linear, 8, 8), lambda m, x: function(m(x))), X, ops=(name,), low=False)


def test_a_function_of_torch_itself_is_one_node():
    def draw(module, x):
        return torch.distributions.Dirichlet(module(x).exp(), validate_args=False).rsample()

    model = One(nn.LayerNorm(8), draw)  # nothing gains by low precision here
    converted = fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=(X,))
    results = []
    for each in (model, converted):
        x = X.clone().requires_grad_()
        torch.manual_seed(3)
        drawn = each(x)
        drawn[:, 0].sum().backward()
        results.append((drawn, x.grad))
    (eager, gradient), (ours, our_gradient) = results
    assert torch.equal(ours, eager)
    assert torch.equal(our_gradient, gradient)


def test_a_listed_function_runs_low():
    seen = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(x.dtype)
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    lists = fxamp.OpLists.default().override(allow=[Note])
    model = One(seeded(nn.Linear, 8, 8), lambda m, x: Note.apply(m(x)))
    converted = fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=(X,), lists=lists)
    seen.clear()
    converted(X).sum().backward()
    assert seen == [LOW]


# ---------------------------------------------------------------------------------------------- checkpoints


class Block(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.use_reentrant = use_reentrant
        self.calls = []

    def inner(self, x):
        return self.drop(self.second(F.relu(self.first(x)).exp())), x + 1

    def forward(self, x):
        out, other = checkpoint(self.inner, self.norm(x), use_reentrant=self.use_reentrant)
        return out + other


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_inside_forward_recomputes_its_nodes(use_reentrant):
    torch.manual_seed(0)
    model = Block(use_reentrant)
    x = torch.randn(6, 8)
    converted = check(model, x, ops=("linear",))
    source = engine_of(converted).all_variants()[0].compiled.source
    assert "checkpointed_0(self" in source
    assert "exp" not in source  # stands in the region
    with _CountCalls() as count:
        out = converted(x).sum()
        forward = count.calls["aten.exp.default"]
        out.backward()
    assert (forward, count.calls["aten.exp.default"]) == (1, 2)
    assert int(model.norm.num_batches_tracked) == 2  # the norm stands outside of the region


class OneOp(nn.Module):
    """A checkpoint around a single op, and a buffer that is written after it and read again."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.ones(8))
        self.op = op

    def forward(self, x):
        op = {"linear": self.second, "gelu": F.gelu}[self.op]
        h = self.norm(self.first(x)) + self.count
        y = checkpoint(op, h, use_reentrant=False)
        self.count.add_(1)
        return self.last(y) + self.count[:4] + self.norm.running_mean.mean()


@pytest.mark.parametrize("denied", [(), ("first",), ("last",), ("**",)])
@pytest.mark.parametrize("op", ["linear", "gelu"])
def test_a_checkpoint_around_one_op_moves_nothing_across_a_write(op, denied):
    torch.manual_seed(0)
    model = OneOp(op)
    twin = copy.deepcopy(model)
    converted = fxamp.convert(twin, dtype=LOW, overrides=dict.fromkeys(denied, "deny"))
    for _ in range(2):
        x = torch.randn(6, 8)
        expected, result = model(x), converted(x)
        torch.testing.assert_close(result, expected, rtol=0, atol=0 if denied == ("**",) else 0.1)
        for out, net in ((expected, model), (result, twin)):
            net.zero_grad()
            out.square().sum().backward()
        for plain, mixed in zip(model.parameters(), twin.parameters(), strict=True):
            if plain.grad is None:
                assert mixed.grad is None
                continue
            size = plain.grad.norm() + 1
            assert (plain.grad - mixed.grad).norm() <= (0 if denied == ("**",) else 0.03) * size
        assert torch.equal(model.count, twin.count)


def test_a_checkpointed_model_compiles_in_one_graph():
    torch.manual_seed(0)
    model = Block(use_reentrant=False).eval()
    x = torch.randn(6, 8)
    converted = fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=(x,))
    torch._dynamo.reset()
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), converted(x), rtol=0, atol=ATOL)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_a_converted_model(use_reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    converted = fxamp.convert(model, dtype=LOW)
    gradients = []
    for run in (converted, lambda x: checkpoint(converted, x, use_reentrant=use_reentrant)):
        model.zero_grad()
        torch.manual_seed(1)
        run(X.clone().requires_grad_()).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


class _CountCalls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] = self.calls.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def test_capture_says_nothing_and_leaves_torch_as_it_was(caplog):
    def patched():
        function = torch.autograd.Function
        return (
            nn.MultiheadAttention.forward,
            inspect.getattr_static(function, "apply"),
            dict(vars(type(function))),
            isinstance,
        )

    before = patched()
    with caplog.at_level(logging.WARNING):
        fxamp.convert(One(seeded(nn.LSTM, 8, 6)), capture="symbolic", example_inputs=(X,))
    assert patched() == before
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert not caplog.records

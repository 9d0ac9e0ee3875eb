"""Residual streams stay float32 in bfloat16: which sums are part of one, what begins it, and what it is worth."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.lists import OpLists
from tests.language import FP16, assert_colours, assert_precision, decided, policy

X, W = torch.rand(8, 8), torch.rand(8, 8)


@pytest.mark.parametrize(
    "program, expected",
    [
        # behind norms: each sum is an operand of the next
        (
            "n=norm(x) f=linear(n) s=add(n,f) m=norm(s) g=linear(m) t=add(m,g) linear(t)",
            "high low high high low high low",
        ),
        # pre-norm: the sum itself is an operand of the next, the norm's result is read low
        (
            "r=tanh(x) n=norm(r) f=linear(n) s=add(r,f) m=norm(s) g=linear(m) t=add(s,g) linear(t)",
            "high ? low high high low high low",
        ),
        # through views, and whichever operand goes on
        ("a=linear n=norm(x) s=add(a,n) v=view(s) t=sub(a,v) linear(t)", "low high high high high low"),
        # the residual scaled at each sum, by a parameter or a number
        (
            "n=norm(x) q=mul(n,p) f=linear(n) s=add(q,f) r=mul(s,p) g=linear(s) t=add(r,g) linear(t)",
            "high high low high high low high low",
        ),
        # or gated by what is computed, as in a highway
        (
            "a=linear n=norm(a) f=linear(n) s=add(n,f) r=mul(s,f) g=linear(s) t=add(r,g) linear(t)",
            "low low low high high low high low",
        ),
        # gated twice, it is another value than it was
        (
            "a=linear n=norm(a) f=linear(n) s=add(n,f) g=linear(s) r=mul(s,f) v=mul(s,g) t=add(r,v) linear(t)",
            "low low low high low high high high low",
        ),
        # what a gate makes of a norm's result is a branch's own: a modulation
        (
            "a=linear n=norm(a) f=linear(n) s=add(n,f) m=norm(s) r=mul(m,f) t=add(r,f) h=linear(t) linear(h)",
            "low low low low low low low low low",
        ),
        # but where that sum is an operand of a third in the same way, it is the state of a recurrent cell
        (
            "a=linear n=norm(a) f=linear(n) s=add(n,f) m=norm(s) r=mul(m,f) t=add(r,f) o=norm(t) q=mul(o,f) u=add(q,f) "
            "linear(u)",
            "low low low high high high high high high high low",
        ),
        # a gated stream is added to the stream
        (
            "a=linear n=norm(a) f=linear(n) s=add(n,f) g=linear(s) r=mul(s,g) t=add(s,r) linear(t)",
            "low low low high low high high low",
        ),
        # one value in several places, each scaled by what weights make: a token shift
        (
            "a=linear n=norm(a) s=add(a,n) m=norm(s) q=tanh(p) u=mul(m,p) v=mul(m,q) t=add(u,v) h=linear(t) linear",
            "low low low low ? low low low low low",
        ),
        # a parameter that is added to a stream does not end it
        (
            "a=linear n=norm(a) f=linear(n) s=add(n,f) r=add(s,p) t=add(r,f) linear(t)",
            "low low low high high high low",
        ),
        # one sum is no stream: scores and their mask
        ("a=linear n=norm(a) s=add(a,n) w=softmax(s) linear(w)", "low low low low low"),
        # nor are sums apart from each other
        ("a=linear n=norm(a) s=add(a,n) b=linear(s) m=norm(b) t=add(b,m) linear(t)", "low low low low low low low"),
        # what autocast adds low: the sums of a residual network
        ("a=linear b=linear(a) s=add(a,b) r=relu(s) c=linear(r) t=add(r,c) linear(t)", "low low low low low low low"),
        # a sum that autocast has low begins a stream behind a norm
        (
            "a=linear b=linear(a) s=add(a,b) n=norm(s) f=linear(n) t=add(n,f) g=linear(t) u=add(t,g) linear(u)",
            "low low ? high low high low high low",
        ),
        # a parameter is not an operand that makes a sum one of a stream
        ("a=linear n=norm(a) s=add(n,p) t=add(s,p) linear(t)", "low low low low low"),
        # what begins the stream is not rounded either, the branches are: here products of a GEMM's result
        (
            "a=linear q=add(a,p) f=linear(q) g=mul(f,p) s=add(q,g) h=linear(s) k=tanh(h) t=add(s,k) linear(t)",
            "low high low low high low low high low",
        ),
        ("n=norm(x) q=mul(n,p) f=linear(q) s=add(q,f) t=add(s,f) linear(t)", "high high low high high low"),
    ],
)
def test_which_sums_stay_float32(program, expected):
    assert_colours(program, expected)


@pytest.mark.parametrize(
    "program, expected, outputs",
    [
        # scaled and shifted by weights, as a diffusion transformer ends
        ("n=norm(x) m=mul(n,p) s=add(m,p) linear(s)", "high high high low", ""),
        ("a=linear n=norm(x) m=mul(n,a) s=add(m,a) v=view(s) linear(v)", "low high high high low low", ""),
        # by what is computed in float32: that is not rounded either
        ("a=linear q=add(a,p) n=norm(x) m=mul(n,q) linear(m)", "low high high high low", ""),
        # in the middle it is little beside the stream that is added to
        ("n=norm(x) m=mul(n,p) s=add(m,p) a=linear(s) linear(a)", "high low low low low", ""),
        ("n=norm(x) m=mul(n,p) a=linear(m) b=linear(a)", "high low low low", "a b"),
        # a norm of what autocast has low
        ("a=linear n=norm(a) m=mul(n,p) linear(m)", "low low low low", ""),
        # behind the last product stands no norm
        ("a=linear m=mul(a,p) linear(m)", "low low low", ""),
    ],
)
def test_what_scales_the_last_norm_stays_float32(program, expected, outputs):
    assert_colours(program, expected, outputs)


class Modulated(nn.Module):
    """The end of a diffusion transformer: a norm, scaled and shifted by a table and the time step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(50, 32), nn.Parameter(torch.randn(2, 32))
        self.time, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens)
        scale, shift = (self.table + self.time(h.mean(1))[:, None]).chunk(2, 1)
        return self.out(F.layer_norm(h, (32,)) * (1 + scale) + shift)


def test_a_norm_that_is_scaled_last_is_as_near_to_float32_as_autocast_s():
    ours, theirs = distances(Modulated)
    assert ours <= 1.02 * theirs
    low, theirs = distances(Modulated, level="aggressive")
    assert low > 1.3 * theirs  # what it is worth


def test_the_user_may_have_the_last_norm_scaled_low():
    own = OpLists.default().override(infer=["mul", "add"])
    assert_colours("n=norm(x) m=mul(n,p) s=add(m,p) linear(s)", "high low low low", chosen=policy(lists=own))


STREAM = "a=linear n=norm(a) f=linear(n) s=add(n,f) g=linear(s) t=add(s,g) linear(t)"


def test_float16_keeps_the_digits_of_tf32_and_the_cut_decides():
    assert_colours(STREAM, "low low low low low low low", chosen=policy(FP16))


def test_the_other_levels_say_themselves_how_far_they_go():
    assert_colours(STREAM, "low low low low low low low", chosen=policy(level="aggressive"))
    assert_colours(STREAM, "low high low high low high low", chosen=policy(level="strict"))


def test_what_the_user_says_of_a_sum_comes_first():
    own = OpLists.default().override(infer=["add"])
    assert_colours(STREAM, "low low low low low low low", chosen=policy(lists=own))
    assert_colours(STREAM, "low low low ? low low low", chosen=policy(overrides={"add": "infer", "add_1": "infer"}))
    denied = OpLists.default().override(deny=["add"])
    assert_colours(STREAM, "low ? low high low high low", chosen=policy(lists=denied))


def test_a_sum_written_in_place_is_one_too():
    def model(x, w):
        h = F.layer_norm(F.linear(x, w), (8,))
        h += F.linear(h, w)
        h += F.linear(h, w)
        return F.linear(h, w)

    setting = decided(model, X, W)
    assert_precision(setting, {"add": "high stream", "add 1": "high stream", "linear 3": "low"})


def test_a_low_value_that_a_stream_is_written_into_is_copied_first():
    def model(x, w):
        a = F.linear(x, w)
        h = F.layer_norm(a, (8,))
        a += h
        a += F.layer_norm(a, (8,))
        return F.linear(a, w)

    setting = decided(model, X, W)
    assert_precision(setting, {"linear": "low", "add": "high stream", "add 1": "high stream"})


class Parallel(nn.Module):
    """Attention and feed-forward side by side, over embeddings: one sum of the stream a block."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Parameter(torch.randn(9, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens):
        h = self.words(tokens)
        for one, other in (self.layers[:2], self.layers[2:]):
            h = h + (one(h) + other(h))
        return h + self.places[: tokens.size(1)].view(1, -1, 8)


def test_rows_of_a_table_are_an_operand_and_a_parameter_is_none():
    module = Parallel()
    setting = decided(lambda m, tokens: m(tokens), torch.randint(50, (2, 5)), module=module)
    wanted = {
        "add": "low",
        "add 1": "high stream",
        "add 2": "low",
        "add 3": "high stream",
        "add 4": "high not low-born",
    }
    assert_precision(setting, wanted)


class Deep(nn.Module):
    """Twelve pre-norm blocks over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Parameter(torch.randn(16, 32))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(12))
        self.ups = nn.ModuleList(nn.Linear(32, 64) for _ in range(12))
        self.downs = nn.ModuleList(nn.Linear(64, 32) for _ in range(12))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens) + self.places
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            h = h + down(F.gelu(up(norm(h))))
        return h


class RunningMean(nn.Module):
    """A state that forgets at learned rates, step by step, as recurrent cells written in Python have one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rates = nn.Embedding(50, 32), nn.Parameter(torch.full((32,), 3.0))
        self.into, self.gate, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words, states = self.words(tokens), []
        state = torch.zeros(tokens.size(0), 32)
        for step in range(tokens.size(1)):
            word = words[:, step]
            state = self.rates.sigmoid() * state + self.gate(word).sigmoid() * self.into(word)
            states.append(state)
        return self.out(torch.stack(states, 1))


class Highway(nn.Module):
    """Layers whose gates say how much of the stream goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 32), nn.Linear(32, 8)
        self.layers, self.gates = (nn.ModuleList(nn.Linear(32, 32) for _ in range(12)) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            carried = 1 - torch.sigmoid(gate(h) - 2)
            h = carried * h + (1 - carried) * layer(h).relu()
        return self.out(h)


def distances(kind: type[nn.Module], **options) -> tuple[float, float]:
    """How far the outputs are from float32's, root mean square over three seeds: fxamp's, autocast's."""
    ours = theirs = 0.0
    for seed in range(3):
        torch.manual_seed(seed)
        model, tokens = kind(), torch.randint(50, (4, 16))
        converted = fxamp.convert(model, torch.bfloat16, (tokens,), **options)
        with torch.no_grad():
            full = model(tokens)
            with torch.autocast("cpu", torch.bfloat16):
                theirs += float((model(tokens) - full).norm() / full.norm()) ** 2
            ours += float((converted(tokens) - full).norm() / full.norm()) ** 2
    return (ours / 3) ** 0.5, (theirs / 3) ** 0.5


@pytest.mark.parametrize(("kind", "worth"), [(Deep, 2), (RunningMean, 1.3), (Highway, 1.2)])
def test_a_deep_stream_is_as_near_to_float32_as_autocast_s(kind, worth):
    ours, theirs = distances(kind)
    assert ours <= 1.1 * theirs
    low, theirs = distances(kind, level="aggressive")
    assert low > worth * theirs  # what it is worth


def test_the_parameters_of_what_stays_float32_are_stored_so():
    torch.manual_seed(0)
    model, tokens = Deep(), torch.randint(50, (4, 16))
    converted = fxamp.convert(model, torch.bfloat16, (tokens,), opt_level="O2")
    assert converted.places.dtype == torch.float32
    assert converted.ups[0].weight.dtype == torch.bfloat16
    assert converted(tokens).dtype == torch.float32


class NormedCell(nn.Module):
    """An LSTM cell whose state passes a norm at each step, as in torchaudio's RNN-T."""

    def __init__(self):
        super().__init__()
        self.inputs, self.states = nn.Linear(8, 64, bias=False), nn.Linear(16, 64, bias=False)
        self.norm, self.gates = nn.LayerNorm(16), nn.LayerNorm(64)

    def forward(self, x):
        hidden = cell = torch.zeros(x.shape[1], 16)
        found = []
        for row in self.inputs(x).unbind(0):
            i, f, n, o = self.gates(row + self.states(hidden)).chunk(4, 1)
            cell = self.norm(f.sigmoid() * cell + i.sigmoid() * n.tanh())
            hidden = o.sigmoid() * cell.tanh()
            found.append(hidden)
        return torch.stack(found)


def test_a_state_that_passes_a_norm_at_each_step_stays_float32():
    torch.manual_seed(0)
    model = fxamp.convert(NormedCell(), dtype=torch.bfloat16, example_inputs=(torch.randn(6, 4, 8),))
    norms = [row for row in fxamp.report(model).rows if row.op == "layer_norm" and row.module == "norm"]
    assert len(norms) == 6 and {row.dtype for row in norms} == {"float32"}

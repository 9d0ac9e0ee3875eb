"""Values that low precision would destroy: literals, taint, exact integers, squares."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp import ir
from tests.language import (
    BF16,
    FP16,
    PIPELINE,
    assert_precision,
    captured,
    decided,
    node_of,
    policy,
    run_graph,
    run_steps,
)

X, W = torch.rand(8, 8), torch.rand(8, 8)
TINY = torch.finfo(torch.float32).tiny


def low_then(tail):
    return lambda x, w: F.linear(tail(F.linear(x, w)), w)


# ------------------------------------------------------------------------------------------------ literals


@pytest.mark.parametrize(
    "tail, op, fp16, bf16",
    [
        (lambda y: y + 1e-5, "add", "high literal", "high literal"),
        (lambda y: y + 0.5, "add", "low", "low"),
        (lambda y: y + 1e-3, "add", "low", "high literal"),  # eps/2 is 4.9e-4 and 3.9e-3
        (lambda y: torch.add(y, other=1e-5), "add", "high literal", "high literal"),
        (lambda y: 1e-5 + y, "add", "high literal", "high literal"),
        (lambda y: y - 1e-6, "sub", "high literal", "high literal"),
        (lambda y: y * 1e-3, "mul", "low", "low"),  # a factor is not an addend
        (lambda y: y * 1e-9, "mul", "high literal", "low"),
        (lambda y: y * 1e5, "mul", "high literal", "low"),
        (lambda y: y / 1e-9, "div", "high literal", "low"),
        (lambda y: y.clamp(min=1e-12), "clamp", "high literal", "low"),
        (lambda y: y.clamp(min=1e-42), "clamp", "high literal", "high literal"),
        (lambda y: y.clamp(0.0, 6.0), "clamp", "low", "low"),
        (lambda y: y.clamp(max=1e6), "clamp", "high literal", "low"),
        (lambda y: torch.clamp_min(y, 1e-12), "clamp_min", "high literal", "low"),
        (lambda y: torch.where(y > 0, y, -1e9), "where", "high literal", "low"),
        (lambda y: y.masked_fill(y > 0, -1e9), "masked_fill", "high literal", "low"),
        (lambda y: y.masked_fill(y > 0, torch.finfo(torch.float32).min), "masked_fill", "high literal", "high literal"),
        (lambda y: y.masked_fill(y > 0, float("-inf")), "masked_fill", "low", "low"),
        (lambda y: y.masked_fill(y > 0, 0.0), "masked_fill", "low", "low"),
        (lambda y: F.pad(y, (1, 0), value=1e9)[:, :8], "pad", "high literal", "low"),
        (lambda y: torch.nan_to_num(y, posinf=1e9), "nan_to_num", "low", "low"),
        (lambda y: y.view(4, 16).view(8, 8), "view", "low", "low"),  # sizes
        (lambda y: y * (y > 1e9), "mul", "low", "low"),  # comparisons
        (lambda y: F.layer_norm(y, (8,), eps=1e-12), "layer_norm", "low", "low"),  # inside the kernel
        (lambda y: F.dropout(y, 1e-5, False), "dropout", "low", "low"),
    ],
)
def test_literals(tail, op, fp16, bf16):
    for low, wanted in ((FP16, fp16), (BF16, bf16)):
        assert_precision(decided(low_then(tail), X, W, chosen=policy(low)), {op: wanted})


# --------------------------------------------------------------------------------------------------- taint


def hugging_face_mask(keep):
    """As transformers makes it: 0 where a token may look, finfo.min elsewhere."""
    return (1.0 - keep[:, None, None, :].float()) * torch.finfo(torch.float32).min


def attention(q, keep):
    return F.scaled_dot_product_attention(q, q, q, attn_mask=hugging_face_mask(keep))


Q, KEEP = torch.rand(2, 1, 4, 8), torch.tensor([[True, True, False, False], [False] * 4])


@pytest.mark.parametrize("low", [FP16, BF16])
@pytest.mark.parametrize("through", ["nothing", "to", "expand", "buffer"])
def test_masks_that_enter_attention_low_are_clamped_and_rows_without_a_token_give_no_nan(low, through):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", hugging_face_mask(KEEP))

        def forward(self, q, keep):
            mask = self.table if through == "buffer" else hugging_face_mask(keep)
            mask = mask.to(torch.float32) if through == "to" else mask
            mask = mask.expand(2, 1, 4, 4) if through == "expand" else mask
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    module = Model()
    setting = captured(lambda m, q, k: m(q, k), Q, KEEP, module=module, chosen=policy(low))
    run_steps(PIPELINE, setting)
    result, _, _ = run_graph(setting, Q, KEEP)
    assert ir.mark(node_of(setting, "scaled_dot_product_attention")).precision == "low"
    assert any(node.target == "clamp" for node in setting.graph.nodes)
    assert torch.isfinite(result).all()
    # Only the first sample has tokens to look at. bfloat16: eps/2 of 1 is 4e-3, five roundings.
    assert torch.allclose(result[0], module(Q, KEEP)[0], atol=2e-2)


def test_a_mask_written_in_place_is_tainted_under_every_name():
    def model(q, keep):
        mask = torch.zeros(2, 1, 4, 4)
        mask.masked_fill_(~keep[:, None, None, :], -1e9)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    setting = captured(model, Q, KEEP, chosen=policy(FP16))
    run_steps(PIPELINE, setting)
    result, _, _ = run_graph(setting, Q, KEEP)
    assert torch.isfinite(result).all()
    assert torch.allclose(result[0], model(Q, KEEP)[0], atol=4e-3)  # fp16: eps/2 of 1 is 5e-4, a few roundings


BUILT_IN_PLACE = {
    "setitem": lambda m, pad: m.__setitem__(pad, -1e9),
    "masked_fill_": lambda m, pad: m.masked_fill_(pad, -1e9),
    "a view's": lambda m, pad: m.view(-1).masked_fill_(pad.view(-1), -1e9),
    "mul_": lambda m, pad: m.add_(pad.float()).mul_(-1e9),
    "copy_": lambda m, pad: m.copy_(torch.where(pad, -1e9, 0.0)),
    "index_put_": lambda m, pad: m.index_put_((torch.arange(4),), torch.tensor(-1e9)),
    "and something else behind it": lambda m, pad: m.masked_fill_(pad, -1e9).__setitem__((0, 0), 0.0),
}
BUILT = {
    "where of a tensor": lambda m, pad: torch.where(pad, torch.tensor(-1e9), torch.tensor(0.0)),
    "a product with a tensor": lambda m, pad: pad.float() * torch.tensor([-1e9]),
    "a sum with a tensor": lambda m, pad: m + torch.tensor(-1e9, dtype=torch.float32),
    "full": lambda m, pad: m + torch.full([], -1e9, dtype=m.dtype),
    "new_tensor": lambda m, pad: torch.where(pad, m.new_tensor(-1e9), m),
}


def built_in_place(write):
    def mask(m, pad):
        m = m.clone()
        write(m, pad)
        return m

    return mask


@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize(
    "mask", [*map(built_in_place, BUILT_IN_PLACE.values()), *BUILT.values()], ids=[*BUILT_IN_PLACE, *BUILT]
)
def test_however_a_mask_is_built_it_enters_attention_finite(mask, level):
    """As float16's own lowest number would: a row without a token is a mean of values; of -inf alone it is none."""

    def model(x, w, pad):
        q = F.linear(x, w)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(torch.zeros(4, 4), pad))

    x, w, pad = torch.rand(2, 4, 8), torch.rand(8, 8), torch.ones(4, 4, dtype=torch.bool)
    setting = captured(model, x, w, pad, chosen=policy(FP16, level=level))
    run_steps(PIPELINE, setting)
    found, _, _ = run_graph(setting, x, w, pad)
    q, lowest = F.linear(x, w), torch.finfo(FP16).min
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=mask(torch.zeros(4, 4), pad).clamp(lowest))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("mask", BUILT.values(), ids=BUILT)
def test_however_a_low_mask_is_built_softmax_of_it_is_finite(mask, level):
    def model(x, w, pad):
        return mask(F.linear(x, w), pad).softmax(-1)

    x, w, pad = torch.rand(4, 8), torch.rand(4, 8), torch.ones(4, 4, dtype=torch.bool)
    setting = captured(model, x, w, pad, chosen=policy(FP16, level=level))
    run_steps(PIPELINE, setting)
    found, _, _ = run_graph(setting, x, w, pad)
    torch.testing.assert_close(found, model(x, w, pad), atol=2e-3, rtol=0)


def test_numbers_of_made_tensors_are_judged_one_by_one():
    setting = decided(low_then(lambda y: y / y.new_tensor([1.0, 1e-9])[1]), X, W, chosen=policy(FP16))
    assert_precision(setting, {"new_tensor": "high literal"})
    setting = decided(low_then(lambda y: y / y.new_tensor([[1.0], [2.0]])[1]), X, W, chosen=policy(FP16))
    assert_precision(setting, {"new_tensor": "low"})


def test_an_infinity_of_a_low_op_is_not_clamped_away():
    """An overflow that became 65504 would be a wrong number without a word: no step is skipped, no NaN is found."""

    def model(x, w):
        return F.linear(F.linear(x, w) * 300.0 * 1e5, w)  # the first product is low, the second beyond its range

    setting = captured(model, X, W, chosen=policy(FP16))
    run_steps(PIPELINE, setting)
    assert [ir.mark(node_of(setting, "mul", number)).precision for number in (0, 1)] == ["low", "high"]
    assert run_graph(setting, X * 1e-4, W * 1e-2)[0].isfinite().all()  # up to 2e4
    top = torch.eye(8) * 0.5
    assert torch.equal(run_graph(setting, X + 1.0, top)[0], torch.full((8, 8), 32752.0))  # a finite number saturates
    assert not run_graph(setting, X + 1e4, top)[0].isfinite().any()  # and an overflow stays one


def test_a_mask_of_a_low_results_size_is_a_mask_all_the_same():
    def model(x, w):
        q = F.linear(x, w)
        mask = torch.full((q.shape[0], q.shape[0]), -1e9).triu(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    setting = captured(model, X, W, chosen=policy(FP16))
    run_steps(PIPELINE, setting)
    targets = [node.target for node in setting.graph.nodes]
    assert "clamp" in targets and "isinf" not in targets


def test_a_clamped_value_that_is_written_in_place_has_its_gradient():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.relu, self.b = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.relu(self.a(x) * 1e-5 * 1e5)).mean()

    torch.manual_seed(8)
    model, x = Model(), torch.randn(4, 8)
    assert model.a(x).abs().min() > 0.02  # no rounding moves one to the other side of the relu
    twin = copy.deepcopy(model)
    converted = fxamp.convert(twin, torch.float16, (x,), overrides={"relu": "allow"})
    assert {"clone", "clamp", "where"} <= {row.op for row in fxamp.report(converted).rows if row.role == "cast"}
    converted(x).backward()
    model(x).backward()
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=0, atol=1e-2 * float(theirs.grad.abs().max()))


def test_a_mask_made_by_full_is_tainted():
    def model(q, keep):
        mask = torch.full((4, 4), -1e9).triu(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    setting = captured(model, Q, KEEP, chosen=policy(FP16))
    run_steps(PIPELINE, setting)
    assert any(node.target == "clamp" for node in setting.graph.nodes)
    assert torch.allclose(run_graph(setting, Q, KEEP)[0], model(Q, KEEP), atol=4e-3)  # a few fp16 roundings


def test_a_mask_that_is_added_by_hand_is_added_high_and_softmax_ends_the_taint():
    def model(x, w, keep):
        scores = F.linear(x, w) + hugging_face_mask(keep)[0, 0]
        return F.linear(torch.softmax(scores, -1), w)

    keep = torch.ones(1, 8, dtype=torch.bool)
    setting = decided(model, X, W, keep, chosen=policy(FP16))
    assert_precision(setting, {"add": "high taint", "mul": "high literal"})
    assert not ir.mark(node_of(setting, "softmax")).tainted


# ------------------------------------------------------------------------------------------------ integers


def rotary(x, w):
    positions = torch.arange(8).float()
    angles = torch.outer(positions, w[0])
    return F.linear(x, w) * angles.cos()


def test_positions_stay_exact():
    assert_precision(decided(rotary, X, W), {"outer": "high integers", "float": "high integers"})


def test_a_rotary_gemm_stays_fp32():
    def model(x, w):
        frequencies = w[:1].t()
        positions = torch.arange(8)[None, :].float()
        return F.linear(x, w) * (frequencies @ positions).cos()

    assert_precision(decided(model, X, W), {"matmul": "high integers", "linear": "low"})


@pytest.mark.parametrize(
    "numbers, wanted",
    [
        (lambda ids: ids * 0.5, "high integers"),
        (lambda ids: torch.cumsum(ids, 0).float(), "high integers"),
        (lambda ids: ids.to(torch.float32).unsqueeze(0), "high integers"),
        (lambda ids: torch.arange(0.0, 8.0).expand(8, 8), "high integers"),
        (lambda ids: ids.float().tanh(), "low"),  # bounded
        (lambda ids: F.one_hot(ids[:, 0], 8).float(), "low"),
        (lambda ids: ids.to(torch.uint8).float(), "low"),  # bytes are exact in bfloat16
        (lambda ids: (ids > 2).float(), "low"),
        (lambda ids: F.embedding(ids[:, 0], W), "low"),  # indices are no numbers
    ],
)
def test_what_is_made_of_integers(numbers, wanted):
    def model(x, w, ids):
        return F.linear(x, w) @ (numbers(ids) + torch.zeros(8, 8))

    setting = decided(model, X, W, torch.arange(64).view(8, 8) % 8)
    assert_precision(setting, {"matmul": wanted})


def test_a_hidden_state_times_a_mask_of_integers_is_no_integer():
    def model(x, w, ids):
        return (F.linear(x, w) * ids.to(x.dtype)) @ w

    setting = decided(model, X, W, torch.arange(64).view(8, 8) % 2)
    assert_precision(setting, {"linear": "low", "mul": "high not low-born", "matmul": "low"})


@pytest.mark.parametrize("bag", [False, True])
def test_a_gemm_reads_rows_of_a_table_times_a_mask_of_integers_low(bag):
    """DeBERTa: embeddings, normed by hand, are masked and go into the first layer."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc = nn.Embedding(8, 8), nn.Linear(8, 8)

        def forward(self, ids, mask):
            rows = F.embedding_bag(ids, self.table.weight) if bag else self.table(ids)
            return self.fc((rows - 0.5) * mask.unsqueeze(-1).to(rows.dtype))

    ids = torch.arange(16).view(2, 8) % 8
    setting = decided(lambda m, *given: m(*given), ids, ids[:, 0] if bag else ids % 2, module=Masked())
    assert_precision(setting, {"mul": "high integers", "linear": "low"})


@pytest.mark.parametrize(
    "read, wanted",
    [
        (lambda grid, moved, h: moved, "low"),  # as autocast reads it: the offset was rounded as well
        (lambda grid, moved, h: moved - grid, "low"),
        (lambda grid, moved, h: torch.cat([grid[:4], h[:4]]) + moved, "low"),
    ],
)
def test_a_gemm_reads_a_grid_that_learned_offsets_move_low_and_the_sum_is_exact(read, wanted):
    """Optical flow: coordinates are a grid and what the network adds, and its difference goes into convolutions."""

    def model(x, w):
        h = F.linear(x, w)
        grid = torch.arange(64).view(8, 8).float()
        return F.linear(read(grid, grid + h, h), w)

    setting = decided(model, X, W)
    assert_precision(setting, {"linear": "low", "add": "high integers", "linear 1": wanted})


def test_a_gemm_reads_integers_alone_as_they_are():
    setting = decided(lambda x, w: F.linear(torch.arange(64).view(8, 8).float() * 2.0, w), X, W)
    assert_precision(setting, {"mul": "high integers", "linear": "high integers"})


def test_an_angle_made_of_positions_and_trained_frequencies_stays_exact():
    def model(x, w, ids):
        return F.linear(x, w) @ (ids.float() * w)

    assert_precision(decided(model, X, W, torch.arange(64).view(8, 8)), {"mul": "high integers", "matmul": "high"})


def test_an_image_of_bytes_goes_low_into_the_first_convolution():
    def model(image, w):
        return F.conv2d(image.float() / 255, w)

    setting = decided(model, torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.rand(2, 3, 3, 3))
    assert_precision(setting, {"conv2d": "low"})


# ------------------------------------------------------------------------------------------------- squares


@pytest.mark.parametrize(
    "tail, op, wanted",
    [
        (lambda y: y * y, "mul", "high square"),
        (lambda y: torch.mul(y, other=y), "mul", "high square"),
        (lambda y: y * y.view(8, 8), "mul", "high square"),
        (lambda y: y * torch.tanh(y), "mul", "low"),
        (lambda y: y**2, "pow", "high list"),
        (lambda y: y.square(), "square", "high list"),
        (lambda y: y * y.var(), "var", "high list"),
        (lambda y: y.std() + y, "std", "high list"),
        (lambda y: y * torch.einsum("ij,ij->", y, y), "einsum", "high square"),
        (lambda y: y * torch.einsum("ij,ij->", y, y.tanh()), "einsum", "high list"),
        (lambda y: y * torch.einsum("ij,ij", y, y), "einsum", "high square"),
        (lambda y: y * torch.einsum("ij,ij->i", y, y), "einsum", "high square"),
        (lambda y: y * torch.einsum("...i,...i->...", y, y.tanh()), "einsum", "high list"),
        (lambda y: y * torch.einsum("ij->j", y), "einsum", "high list"),
        (lambda y: torch.einsum("ij,jk->ik", y, y), "einsum", "low"),
        (lambda y: torch.einsum("ij,kj", y, y), "einsum", "low"),
        (lambda y: torch.einsum("ij,ij->ij", y, y.tanh()), "einsum", "low"),
        (lambda y: torch.einsum("ij,jk->ijk", y, y.tanh())[0], "einsum", "low"),
        (lambda y: torch.einsum("ij,ij->ij", y, y), "einsum", "high square"),
        (lambda y: torch.einsum("ij,j,ij->ij", y, y.tanh()[0], y), "einsum", "high square"),
        (lambda y: torch.einsum("i,ij->j", y.tanh()[0], y), "einsum", "low"),
        (lambda y: y * torch.einsum("ij,jk->j", y, y.tanh()), "einsum", "high list"),
        (lambda y: y * torch.einsum("ij,jk->ij", y, y.tanh()), "einsum", "high list"),
        (lambda y: y * torch.einsum("ij,j->i", y, y.amax(0)), "einsum", "low"),
        (lambda y: y * torch.inner(y.flatten(), y.flatten()), "inner", "high square"),
        (lambda y: y * torch.matmul(y.flatten(), y.tanh().flatten()), "matmul", "high list"),
        (lambda y: torch.inner(y, y), "inner", "low"),
        (lambda y: y @ y.mT, "matmul", "low"),
    ],
)
def test_squares_are_powers(tail, op, wanted):
    assert_precision(decided(low_then(tail), X, W, chosen=policy(FP16)), {op: wanted})


@pytest.mark.parametrize("equation", ["ij->ji", "ij", "ii->i", "...j->j...", "i j -> j i"])
def test_an_einsum_of_one_operand_passes_its_numbers_on(equation):
    """It multiplies nothing, so that torch.autocast leaves it in the dtype of its operand, too."""
    setting = decided(lambda y: torch.einsum(equation, y.exp()), X)
    assert_precision(setting, {"einsum": "high"})
    assert ir.mark(node_of(setting, "einsum")).colour == "clear"


@pytest.mark.parametrize("equation", ["ij,jk->ijk", "...j,j->...j", "ij,ij->ij", "ij,jk"])
def test_an_einsum_that_adds_up_nothing_is_a_product(equation):
    """torch.autocast leaves such a one in the dtype of its operands: exp(einsum("bld,dn->bldn", delta, A)) of Mamba."""
    y, other = X, {"...j,j->...j": X[0], "ij,ij->ij": X}.get(equation, X.mT)
    setting = decided(lambda y, other: torch.einsum(equation, y.cumsum(0), other.cumsum(-1)), y, other)
    is_sum = equation == "ij,jk"
    assert_precision(setting, {"einsum": "low" if is_sum else "high"})
    assert ir.mark(node_of(setting, "einsum")).colour == ("allow" if is_sum else "infer")


def test_a_product_of_an_einsum_is_the_user_s_to_allow():
    lists = policy().lists.override(allow=["einsum"])
    setting = decided(lambda y: torch.einsum("ij,ij->ij", y.cumsum(0), y.cumsum(1)), X, chosen=policy(lists=lists))
    assert_precision(setting, {"einsum": "low"})


@pytest.mark.parametrize("product", [lambda y, n: y * n, lambda y, n: torch.einsum("ij,j->ij", y, n)])
def test_a_product_of_rounded_numbers_and_integers_is_no_integer(product):
    """What is made of it may be low: at level 'aggressive' the sum, which a GEMM reads."""
    tail = lambda y: torch.tanh(product(y, torch.arange(8).float()))  # noqa: E731
    setting = decided(low_then(tail), X, W, chosen=policy(level="aggressive"))
    assert_precision(setting, {"tanh": "low"})


class StateSpace(nn.Module):
    """A selective scan as Mamba's reference writes it (Gu and Dao, 2023), step by step."""

    def __init__(self, width=16, states=8):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.step, self.leave = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, 2 * states)
        self.rates = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(width, 1))

    def forward(self, x):
        u, delta = F.silu(self.enter(x)), F.softplus(self.step(x))
        reads, writes = self.project(x).chunk(2, -1)
        decay = torch.einsum("bld,dn->bldn", delta, -self.rates.exp()).exp()
        change = torch.einsum("bld,bln,bld->bldn", delta, writes, u)
        state, found = torch.zeros_like(change[:, 0]), []
        for place in range(x.shape[1]):
            state = decay[:, place] * state + change[:, place]
            found.append(torch.einsum("bdn,bn->bd", state, reads[:, place]))
        return self.leave(torch.stack(found, 1))


def test_gradients_of_a_state_space_are_as_near_as_autocasts():
    x = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(0))

    def gradients(model, is_autocast=False):
        with torch.autocast("cpu", FP16, enabled=is_autocast):
            y = model(x)
        y.float().square().mean().backward()
        return model.rates.grad

    exact = gradients(StateSpace())
    autocasts, own = gradients(StateSpace(), True), gradients(fxamp.convert(StateSpace(), FP16))
    assert (own - exact).norm() <= 1.5 * (autocasts - exact).norm()


def test_an_einsum_of_one_operand_is_low_between_gemms():
    assert_precision(decided(lambda y, w: torch.einsum("ij->ji", y @ w) @ w, X, W), {"einsum": "low"})


def test_a_square_spreads_like_any_deny_node():
    assert_precision(decided(low_then(lambda y: (y * y) + 1.0), X, W), {"add": "high downstream"})


def test_a_hand_written_rms_norm_at_sigma_300_is_not_zero_in_fp16():
    def rms_norm(x, w):
        y = F.linear(x, w)
        return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)

    x = 300 * torch.eye(8)
    setting = captured(rms_norm, x, torch.eye(8), chosen=policy(FP16))
    run_steps(PIPELINE, setting)
    result, _, _ = run_graph(setting, x, torch.eye(8))
    assert torch.allclose(result, rms_norm(x, torch.eye(8)), rtol=2e-3)  # two fp16 roundings


@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_equal_rows_are_added_in_float32(dtype, level):
    """4096 gradients of 1 for one row of a table add up to 256 in bfloat16 and 2048 in float16."""
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8, bias=False))
    nn.init.eye_(model[1].weight)
    converted = fxamp.convert(model, dtype=dtype, level=level)
    converted(torch.zeros(4096, dtype=torch.long)).sum().backward()
    assert torch.equal(model[0].weight.grad[0], torch.full((8,), 4096.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_an_indexed_parameter_are_added_in_float32(dtype):
    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 8))
            self.head = nn.Linear(8, 8, bias=False)
            nn.init.eye_(self.head.weight)

        def forward(self, index):
            return self.head(self.table[index])

    model = Bias()
    fxamp.convert(model, dtype=dtype)(torch.zeros(4096, dtype=torch.long)).sum().backward()
    assert torch.equal(model.table.grad[0], torch.full((8,), 4096.0))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_difference_of_weights_is_not_made_of_rounded_ones(low):
    class Decaying(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.decay = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.tensor(0.998))

        def forward(self, x):
            return self.layer(self.layer(x) * (1 - self.decay))

    torch.manual_seed(0)
    model, x = Decaying(), torch.rand(4, 8)
    torch.nn.init.zeros_(model.layer.bias)
    converted = fxamp.convert(copy.deepcopy(model), low)
    assert (converted(x) - model(x)).norm() < 0.02 * model(x).norm()


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [-1e9, 1e5, float("-inf"), -1e4])
def test_at_o3_a_number_that_the_low_dtype_cannot_hold_keeps_its_op_in_float32(low, number):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a = torch.nn.Linear(8, 8)

        def forward(self, x, mask):
            return self.a(x).masked_fill(mask, number).clamp(max=10.0).softmax(-1)

    x, mask = torch.linspace(-1, 1, 32).reshape(4, 8), torch.eye(4, 8, dtype=torch.bool)
    model = Masked()
    expected = model(x, mask)
    converted = fxamp.convert(model, low, (x, mask), opt_level="O3")
    torch.testing.assert_close(converted(x, mask), expected, rtol=0, atol=0.02)
    is_beyond = low == torch.float16 and number in (-1e9, 1e5)
    (row,) = (row for row in fxamp.report(converted).rows if row.op == "masked_fill")
    assert row.precision == ("high" if is_beyond else "low")
    assert row.reason_kind == ("literal" if is_beyond else "level")


class StandardisedConv2d(torch.nn.Conv2d):
    """Takes the mean off each of its filters, and scales them to a variance of 1."""

    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = self.norm(flat, None, None).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, padding=1)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_standardised_weights_are_normalised_in_float32(norm, dtype, opt_level):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(StandardisedConv2d(3, 16, 3), torch.nn.GroupNorm(4, 16), torch.nn.ReLU()),
        *(StandardisedConv2d(16, 16, 3), torch.nn.Flatten(), torch.nn.Linear(16 * 64, 10)),
    )
    for layer in (model[0], model[3]):
        layer.norm = functools.partial(norm, **{"training": True} if norm is F.batch_norm else {})
        with torch.no_grad():
            layer.weight.add_(0.3)  # three times the spread
    inputs, exact = torch.randn(4, 3, 8, 8), copy.deepcopy(model).double()
    expected = exact(inputs.double())
    expected.square().mean().backward()
    autocast = copy.deepcopy(model)
    with torch.autocast("cpu", dtype):
        theirs = autocast(inputs)
    theirs.float().square().mean().backward()
    converted = fxamp.convert(model, dtype, opt_level=opt_level, example_inputs=(inputs,))
    ours = converted(inputs)
    ours.square().mean().backward()
    weights = [each.get_submodule("3").weight.grad for each in (model, autocast, exact)]
    for mine, other, right in ((ours, theirs, expected), weights):
        assert (mine.double() - right).norm() <= 1.1 * (other.double() - right).norm()

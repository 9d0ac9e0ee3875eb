"""Fake twins of real tensors: what a capture knows of a tensor without running anything on it."""

import warnings

import pytest
import torch
from torch import nn

import fxamp
from fxamp.fakes import Fakes


def with_gradient(dtype: torch.dtype) -> nn.Parameter:
    """A float16 parameter whose gradient has another dtype, as LossScaler.unscale_ leaves it."""
    weight = nn.Parameter(torch.randn(4, 6).half())
    if hasattr(weight, "grad_dtype"):  # from torch 2.10 on
        weight.grad_dtype = None
    weight.grad = torch.zeros(4, 6, dtype=dtype)
    return weight


def facts(fake) -> tuple[object, ...]:
    shape = (fake.shape, fake.stride(), fake.storage_offset())
    kind = (fake.dtype, fake.device, fake.requires_grad, fake.is_leaf, isinstance(fake, nn.Parameter))
    return *shape, *kind


READINGS = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight.view(6, 4),
    "a transpose": lambda weight: weight.t(),
    "a part": lambda weight: weight[1:, ::2],
    "detached": lambda weight: weight.detach(),
}


@pytest.mark.parametrize("reading", READINGS)
def test_a_gradient_changes_nothing_of_the_twin(reading):
    plain, read = nn.Parameter(torch.randn(4, 6).half()), READINGS[reading]
    twins = [Fakes(nn.Identity()).of(read(weight)) for weight in (plain, with_gradient(torch.float16))]
    assert facts(twins[0]) == facts(twins[1]) == facts(read(plain))


@pytest.mark.parametrize("reading", READINGS)
def test_a_gradient_of_another_dtype_is_no_part_of_the_twin(reading):
    weight = with_gradient(torch.float32)
    value = READINGS[reading](weight)
    assert facts(Fakes(nn.Identity()).of(value)) == facts(value)
    assert weight.grad.dtype == torch.float32


def test_one_tensor_has_one_twin_and_views_share_their_storage():
    weight, fakes = with_gradient(torch.float32), Fakes(nn.Identity())
    assert fakes.of(weight) is fakes.of(weight)
    storages = {fakes.of(value).untyped_storage()._cdata for value in (weight, weight.t(), weight.view(-1))}
    assert len(storages) == 1


def test_warnings_as_errors_do_not_keep_a_value_with_a_history_out_of_a_graph():
    fed = nn.Linear(4, 8)(torch.randn(2, 4))
    converted = fxamp.convert(nn.Linear(8, 2), dtype=torch.bfloat16, capture="symbolic")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(fed).sum().backward()
    assert fxamp.report(converted).low_precision_nodes == 1


def test_in_place_writes_are_refused_where_torch_refuses_them():
    weight, fakes = with_gradient(torch.float32), Fakes(nn.Identity())
    with pytest.raises(RuntimeError, match="leaf Variable"):
        fakes.of(weight).add_(1)
    hidden = weight * 2
    hidden.retain_grad()
    hidden.sum().backward()
    fakes.of(hidden).add_(1)  # no leaf


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
@pytest.mark.parametrize("capture", ["auto", "symbolic"])
def test_validation_after_the_step_with_the_gradients_still_there(opt_level, capture):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    converted = fxamp.convert(model, dtype="float16", opt_level=opt_level, capture=capture, example_inputs=(x,))
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.AdamW(converted.parameters()))
    scaler = fxamp.LossScaler()
    optimizer.zero_grad()
    scaler.scale(converted(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(converted.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert {(weight.dtype, weight.grad.dtype) for weight in converted.parameters()} == {(torch.float16, torch.float32)}
    converted.eval()
    torch.testing.assert_close(converted(x).float(), model(x.half()).float(), rtol=2**-9, atol=2**-9)
    assert converted(x.view(2, 4, 16)).shape == (2, 4, 4)


class Writes(nn.Module):
    """Writes as autograd refuses them, which calls without gradients may make."""

    def __init__(self, write):
        super().__init__()
        self.fc, self.head, self.write = nn.Linear(8, 8), nn.Linear(8, 3), write

    def forward(self, x):
        return self.head(self.write(self, x))


def into_chunks(model, x):
    y = model.fc(x)
    first, second = y.chunk(2, -1)
    first.mul_(2)
    second += first
    return y


def into_rows(model, x):
    y = model.fc(x)
    y.unbind(0)[0].zero_()
    return y


def into_an_input(model, x):
    x[..., 0] = 1
    return model.fc(x.abs_())


def into_a_weight(model, x):
    model.fc.weight.clamp_(-0.125, 0.125)
    return model.fc(x)


def by_out(model, x):
    y = model.fc(x)
    return torch.add(y, x, out=torch.empty_like(y))


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("write", [into_chunks, into_rows, into_an_input, into_a_weight, by_out])
def test_a_write_that_autograd_refuses_is_made_where_gradients_are_off(write, example):
    torch.manual_seed(0)
    model, x = Writes(write), torch.randn(2, 8, requires_grad=True)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,) if example else None, capture="symbolic")
    for mode in (torch.no_grad, torch.inference_mode):
        given, same = (x.detach().clone().requires_grad_() for _ in range(2))
        with mode():
            expected, found = model(given), converted(same)
        assert torch.equal(given, same)
        assert not torch.equal(found, expected), "nothing ran low"
        assert torch.allclose(found, expected, atol=2**-4)  # a few roundings to 8 bits of values below 4
    for side in (model, converted):
        with pytest.raises(RuntimeError, match=r"in-place operation|modified inplace|out=\.\.\. arguments"):
            side(x.detach().clone().requires_grad_())


class OtherwiseWithoutGradients(nn.Module):
    """Does with gradients what no graph can follow, and without them something else."""

    def __init__(self, what):
        super().__init__()
        self.fc, self.what = nn.Linear(8, 8), what

    def forward(self, x, other):
        y = self.fc(x)
        if not torch.is_grad_enabled():
            return y, None
        if self.what == "a number":
            return y, y.sum().item()
        other.add_(100)
        return y, other


class Around(nn.Module):
    def __init__(self, what, is_hooked):
        super().__init__()
        self.part, self.head = OtherwiseWithoutGradients(what), nn.Linear(8, 3)
        if is_hooked:
            self.part.register_forward_hook(lambda *call: None)

    def forward(self, x):
        other = x * 2
        y, more = self.part(x, other)
        return self.head(y if more is None else y + more) + other.mean()


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("is_hooked", [True, False])
@pytest.mark.parametrize("what", ["a number", "a write"])
def test_what_a_module_does_without_gradients_is_not_taken_for_what_it_does(what, is_hooked, example):
    torch.manual_seed(0)
    model, x = Around(what, is_hooked), torch.randn(2, 8)
    options = {} if is_hooked else {"boundaries": ("part",)}
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(x,) if example else None, **options)
    expected = model(x)
    # at most sixteen roundings to 8 bits, each 2**-9 of values that are no larger than the largest result
    assert torch.allclose(converted(x), expected, atol=2**-5 * expected.abs().max().item())


@pytest.mark.parametrize("way", ["unscale_", "master_params"])
def test_a_hook_may_come_while_there_are_float32_gradients(way):
    """The module stays whole from then on, and is looked at with its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 40))
    model = fxamp.convert(model, dtype=torch.float16, opt_level="O2")
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler, x = fxamp.LossScaler(), torch.randn(4, 16)
    scaler.scale(model(x).square().mean()).backward()
    if way == "unscale_":
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    else:
        list(fxamp.master_params(optimizer))
    seen = []
    model[1].register_forward_hook(lambda module, given, output: seen.append(output.shape))
    expected = nn.Sequential(*model)(x.half()).float()
    assert torch.allclose(model(x), expected, atol=0.01) and seen

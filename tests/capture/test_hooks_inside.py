"""Hooks on modules inside of one that stays whole for its own: captures do not fire them, calls do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.weight_norm import weight_norm

import fxamp
from fxamp.errors import CaptureError

X = torch.linspace(-1, 1, 16).reshape(2, 8)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8))), nn.Linear(8, 8))


def watch(module, path, seen):
    """All kinds of hooks of torch's on a module."""

    def note(kind):
        def hook(module, *given):
            tensors = [each for each in torch.utils._pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
            assert {type(each) for each in tensors} == {torch.Tensor}, f"{kind} of {path} met {tensors}"
            tensors[0].tolist()
            seen.append((kind, path))

        return hook

    module.register_forward_hook(note("forward"))
    module.register_forward_pre_hook(note("forward_pre"))
    module.register_forward_pre_hook(note("forward_pre_kwargs"), with_kwargs=True)
    module.register_full_backward_hook(note("backward"))
    module.register_full_backward_pre_hook(note("backward_pre"))


def fired(model, paths):
    seen = []
    for path in paths:
        watch(model.get_submodule(path), path, seen)
    for number in range(3):
        x = (X + number).requires_grad_()
        model(x).float().sum().backward()
    return seen


EVERY = ["", "0", "0.0", "0.1", "0.1.0", "0.1.1", "1"]


@pytest.mark.parametrize("paths", [EVERY, EVERY[1:], ["0", "0.1.1"]], ids=["all", "all inside", "two"])
@pytest.mark.parametrize("options", [{}, {"opt_level": "O2"}, {"boundaries": ["0.1"]}, {"capture": "symbolic"}])
def test_hooks_fire_once_for_each_call_and_see_real_tensors(paths, options):
    converted = fxamp.convert(model(), torch.bfloat16, **options)
    assert fired(converted, paths) == fired(model(), paths)


def test_what_a_hook_inside_returns_counts():
    plain = model()
    for module in (plain[0], plain[0][1]):
        module.register_forward_hook(lambda module, given, out: out + 1)
    converted = fxamp.convert(copy.deepcopy(plain), torch.bfloat16)
    torch.testing.assert_close(converted(X), plain(X), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("capture", ["symbolic", "auto"])
def test_a_forward_that_needs_a_hook_inside_is_no_graph(capture):
    plain = nn.Sequential(nn.Sequential(nn.Linear(8, 6), nn.Linear(8, 8)), nn.Linear(8, 8))
    plain[0].register_forward_hook(lambda module, given, out: None)
    plain[0][0].register_forward_hook(lambda module, given, out: torch.nn.functional.pad(out, (0, 2)))
    converted = fxamp.convert(copy.deepcopy(plain), torch.bfloat16, capture=capture)
    if capture == "symbolic":
        with pytest.raises(CaptureError, match=r"'0' has hooks, and without them it fails"):
            converted(X)
    else:
        torch.testing.assert_close(converted(X), plain(X), rtol=0.02, atol=0.02)


class Remembering(nn.Module):
    """Reads what its own hook on a part keeps."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner.register_forward_hook(self.keep)
        self.inner.register_forward_hook(lambda module, given, out: self.kept.append(out.detach()))

    def keep(self, module, given, out):
        self.last, self.kept = out, []

    def forward(self, x):
        return self.inner(x) + self.last


class Extracting(nn.Module):
    """Its own method is the hook: it sets an attribute, or puts into a dictionary."""

    def __init__(self, sets):
        super().__init__()
        self.net, self.kept = nn.Sequential(nn.Linear(8, 8)), {}
        self.net[0].register_forward_hook(self.set if sets else self.put)

    def set(self, module, given, out):
        self.last = out

    def put(self, module, given, out):
        self.kept["last"] = out

    def forward(self, x):
        self.net(x)
        return self.kept["last"]


@pytest.mark.parametrize("sets", [True, False])
def test_a_hook_that_sets_an_attribute_of_the_model_before_conversion_is_warned_about(sets, caplog):
    converted = fxamp.convert(Extracting(sets), torch.bfloat16)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == sets and all("a hook on 'net.0'" in text and "its last:" in text for text in messages)
    if not sets:
        for number in range(2):
            expected = nn.functional.linear(X + number, converted.net[0].weight, converted.net[0].bias)
            torch.testing.assert_close(converted(X + number).float(), expected, rtol=0.02, atol=0.02)


def remembering():
    torch.manual_seed(0)
    model = nn.Sequential(Remembering(), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, given, out: None)
    return model


@pytest.mark.parametrize("options", [{"capture": "symbolic"}, {}, {"opt_level": "O2"}])
def test_hooks_of_a_modules_own_fire_on_a_copy_of_it(options):
    plain, model = remembering(), remembering()
    converted = fxamp.convert(model, torch.bfloat16, **options)
    for _ in range(2):
        torch.testing.assert_close(converted(X).float(), plain(X), rtol=0.02, atol=0.02)
        assert [type(kept) for kept in converted[0].kept] == [torch.Tensor]
    assert type(converted[0].last) is torch.Tensor


def test_hooks_that_compute_weights_are_a_part_of_forward():
    plain, converted = model(), model()
    for each in (plain, converted):
        weight_norm(each[0][1][1])
        each[0].register_forward_hook(lambda module, given, out: None)
    converted = fxamp.convert(converted, torch.bfloat16, capture="symbolic")
    with torch.no_grad():
        for each in (plain, converted):
            each[0][1][1].weight_g.mul_(2)
    torch.testing.assert_close(converted(X), plain(X), rtol=0.02, atol=0.02)

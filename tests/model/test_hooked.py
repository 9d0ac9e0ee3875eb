"""Modules with hooks that hold much of the weights: hooks fire as ever, and what stands behind them is low."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of
from tests.choosing import Block, batch

LOW = torch.bfloat16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.norm, self.head = Block(), nn.Sequential(Block(), Block()), nn.LayerNorm(16), Block()

    def forward(self, x):
        return self.head(self.norm(self.body(self.stem(x))))


def net():
    torch.manual_seed(0)
    return Net()


def converted_with(paths, hook=lambda module, given, out: None, **options):
    converted = fxamp.convert(net(), LOW, **options)
    for path in paths:
        converted.get_submodule(path).register_forward_hook(hook)
    return converted


def gradients(model, x, autocast=False):
    model.zero_grad()
    with torch.autocast("cpu", LOW, enabled=autocast):
        out = model(x)
    out.float().square().mean().backward()
    return torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])


def low_modules(converted):
    return {row.module for row in fxamp.report(converted).rows if row.op == "linear" and row.precision == "low"}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("paths", [["body"], ["body.0", "body.1"], ["stem", "body", "head"]], ids=str)
def test_what_is_behind_a_hook_is_low_and_as_near_to_float32_as_under_autocast(paths, opt_level, caplog):
    seen = []
    converted = converted_with(paths, lambda module, given, out: seen.append(type(out)), opt_level=opt_level)
    plain, low = net(), net()
    expected, found = gradients(plain, batch(0)), gradients(converted, batch(0))
    autocast = gradients(low, batch(0), autocast=True)
    assert (found - expected).norm() <= 1.5 * (autocast - expected).norm()
    assert seen == [torch.Tensor] * len(paths)
    assert set(engine_of(converted).blocks) >= set(paths) and low_modules(converted)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_hooks_that_come_and_go_while_it_trains_change_nothing():
    def losses(model, optimizer, hooks=None):
        for step in range(10):
            if hooks is not None and step % 3 == 1:
                hooks.append(model.body.register_forward_hook(lambda module, given, out: None))
            if hooks and step % 3 == 0:
                hooks.pop().remove()
            loss = model(batch(step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    without, hooked = fxamp.convert(net(), LOW), fxamp.convert(net(), LOW)
    expected = list(losses(without, torch.optim.SGD(without.parameters(), 0.1)))
    found = list(losses(hooked, torch.optim.SGD(hooked.parameters(), 0.1), []))
    assert found == pytest.approx(expected, rel=0.01)
    assert len(engine_of(hooked).all_variants()) == 1 and not engine_of(hooked).blocks  # without, once more


def test_few_weights_behind_hooks_stay_in_the_one_graph():
    model = net()
    model.body.append(nn.Linear(16, 16))
    converted = fxamp.convert(model, LOW)
    converted.body[2].register_forward_hook(lambda module, given, out: None)
    gradients(converted, batch(0))
    (variant,) = engine_of(converted).all_variants()
    assert [node.target for node in variant.graph.nodes if node.op == "call_module"] == ["body.2"]


def test_a_hook_on_a_table_of_embeddings_is_none_on_what_is_multiplied():
    """Noise on embeddings (NEFTune) comes by such a hook."""
    torch.manual_seed(0)
    converted = fxamp.convert(nn.Sequential(nn.Embedding(1000, 16), Block()), LOW)
    converted[0].register_forward_hook(lambda module, given, out: out + 1)
    gradients(converted, torch.tensor([[1, 2, 3]]))
    (variant,) = engine_of(converted).all_variants()
    assert [node.target for node in variant.graph.nodes if node.op == "call_module"] == ["0"]


@pytest.mark.parametrize("options", [{"capture": "symbolic"}, {"opt_level": "O3"}])
def test_a_graph_that_was_asked_for_runs_them_whole(options):
    if "opt_level" in options:
        options["example_inputs"] = (batch(0),)
    model = net()
    model.body.register_forward_hook(lambda module, given, out: None)
    converted = fxamp.convert(model, LOW, **options)
    gradients(converted, batch(0))
    assert not engine_of(converted).blocks and len(engine_of(converted).all_variants()) == 1


def test_a_plan_decides_in_what_is_behind_hooks(tmp_path):
    found = []
    for given in ({"overrides": {"body.1.up": "deny"}}, {"plan": tmp_path / "plan.json"}):
        converted = converted_with(["body"], **given)
        gradients(converted, batch(0))
        fxamp.report(converted).save_plan(tmp_path / "plan.json")
        found.append((low_modules(converted), converted(batch(1))))
    assert "body.1.up" not in found[1][0] and found[1][0] == found[0][0]
    assert torch.equal(found[1][1], found[0][1])


def test_what_a_hook_gives_counts():
    plain = net()
    plain.body.register_forward_hook(lambda module, given, out: out * 3)
    plain.body[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    converted = fxamp.convert(copy.deepcopy(plain), LOW)
    for _ in range(2):
        torch.testing.assert_close(converted(batch(0)), plain(batch(0)), rtol=0.05, atol=0.1, check_dtype=False)


def test_hooks_on_all_modules_fire_as_in_float32():
    def calls(model):
        seen = []
        for path, module in model.named_modules():
            module.register_forward_hook(lambda module, given, out, path=path: seen.append(path))
            module.register_full_backward_hook(lambda module, given, out, path=path: seen.append(f"{path} back"))
        for step in range(2):
            gradients(model, batch(step).requires_grad_())
        return seen

    assert calls(fxamp.convert(net(), LOW)) == calls(net())


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_hooks_get_the_modules_themselves(opt_level):
    """Who keeps activations by module, or by its id, finds them there."""
    seen = []

    def before(module, given):
        seen.append(module)

    def after(module, args, kwargs, out):
        seen.append(module)

    converted = fxamp.convert(net(), LOW, opt_level=opt_level)
    for part in (converted.body, converted.norm, converted.head):
        part.register_forward_pre_hook(before)
        part.register_forward_hook(after, with_kwargs=True, always_call=True)
        part.register_full_backward_pre_hook(before)
        part.register_full_backward_hook(lambda module, given, out: seen.append(module))
    gradients(converted, batch(0))
    assert engine_of(converted).blocks
    paths = {id(module): path for path, module in converted.named_modules()}
    forward = ["body"] * 2 + ["norm"] * 2 + ["head"] * 2
    assert [paths.get(id(module)) for module in seen] == forward + forward[::-1]


def test_old_spectral_norms_iterate_once_a_call_and_what_they_norm_is_low():
    def discriminator():
        torch.manual_seed(0)
        layers = [
            nn.utils.spectral_norm(nn.Linear(16, 16)),
            nn.LeakyReLU(0.2),
            nn.utils.spectral_norm(nn.Linear(16, 16)),
        ]
        return nn.Sequential(*layers)

    plain, low, converted = discriminator(), discriminator(), fxamp.convert(discriminator(), LOW)
    dtypes = []
    converted[2].register_forward_hook(lambda module, given, out: dtypes.append(out.dtype))
    for step in range(3):
        expected, found = gradients(plain, batch(step)), gradients(converted, batch(step))
        autocast = gradients(low, batch(step), autocast=True)
        assert (found - expected).norm() <= 2 * (autocast - expected).norm()
    torch.testing.assert_close(converted[0].weight_u, plain[0].weight_u, rtol=0.02, atol=0.02)
    assert dtypes == [LOW] * 3
    with torch.no_grad():
        before = converted.eval()[0].weight_u.clone()
        torch.testing.assert_close(converted(batch(9)).float(), plain.eval()(batch(9)), rtol=0.05, atol=0.05)
        assert torch.equal(before, converted[0].weight_u)


@pytest.mark.parametrize("first", [torch.no_grad, torch.enable_grad])
def test_a_model_that_is_only_asked_is_low_too(first):
    dtypes = []
    converted = converted_with(["body.0.up"], lambda module, given, out: dtypes.append(out.dtype)).eval()
    plain = net()
    for mode in (first, torch.no_grad, torch.enable_grad, torch.no_grad):
        with mode():
            torch.testing.assert_close(converted(batch(0)).float(), plain(batch(0)), rtol=0.05, atol=0.05)
    assert dtypes == [LOW] * 4


def test_copies_and_pickles_keep_their_hooks():
    seen = []
    converted = converted_with(["body"], Noting(seen))
    gradients(converted, batch(0))
    for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        (hook,) = twin.body._forward_hooks.values()
        hook.seen.clear()
        assert torch.equal(gradients(twin, batch(0)), gradients(converted, batch(0)))
        assert len(hook.seen) == 1


class Noting:
    def __init__(self, seen):
        self.seen = seen

    def __call__(self, module, given, out):
        self.seen.append(len(given))


@pytest.mark.usefixtures("fresh_dynamo")
def test_it_runs_under_torch_compile():
    seen = []
    converted = converted_with(["body"], Noting(seen))
    compiled = torch.compile(converted, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(batch(0)).float(), net()(batch(0)), rtol=0.05, atol=0.05)
    assert seen


def test_the_report_says_why():
    converted = converted_with(["body"])
    gradients(converted, batch(0))
    (outside,) = fxamp.report(converted).outside
    assert "modules with hooks hold 50% of the weights (body)" in outside and "torch.autocast" in outside


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_preview_does_not_warn_of_what_the_first_call_does_otherwise(opt_level, caplog):
    model = net()
    model.body.register_forward_hook(lambda module, given, out: None)
    model.head.register_forward_hook(lambda module, given, out: None)
    converted = fxamp.convert(model, LOW, opt_level=opt_level)
    gradients(converted, batch(0))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert low_modules(converted)


@pytest.mark.parametrize("is_given", [True, False], ids=["example", "none"])
def test_at_o3_modules_that_hooks_keep_whole_are_stored_as_they_run(is_given):
    """A preview does not know in which precision the second one is."""
    model = net()
    for block in (model.stem, model.body, model.head):
        block.register_forward_hook(lambda module, given, out: None)
    example = (batch(0),) if is_given else None
    converted = fxamp.convert(model, LOW, example_inputs=example, opt_level="O3")
    gradients(converted, batch(0))
    stored = {name.partition(".")[0]: parameter.dtype for name, parameter in converted.named_parameters()}
    assert stored["norm"] == LOW and stored["stem"] == stored["body"] == stored["head"] == torch.float32


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("is_given", [True, False], ids=["example", "none"])
def test_an_override_inside_of_a_module_with_hooks_holds_in_its_graph(is_given, opt_level):
    model = net()
    model.body.register_forward_hook(lambda module, given, out: None)
    options = {"overrides": {"body.1.up": "deny"}, "opt_level": opt_level}
    converted = fxamp.convert(model, LOW, example_inputs=(batch(0),) if is_given else None, **options)
    gradients(converted, batch(0))
    assert "body.1.up" not in low_modules(converted) and {"body.1.down", "body.0.up"} <= low_modules(converted)
    with pytest.raises(fxamp.OptionError, match=r"'body.1.upp' matches no module.*Did you mean 'body.1.up'"):
        fxamp.convert(net(), LOW, overrides={"body.1.upp": "deny"})


class Overflows(nn.Module):
    """Layers too small to be graphs by themselves, one with a hook, around a product that float16 does not hold."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.b.register_forward_hook(lambda module, given, out: None)

    def forward(self, x):
        return self.c(self.b(self.a(x)) * 1e4 * 1e4 * 1e-8)


def test_what_ranges_or_a_plan_say_of_a_forward_without_graphs_is_told(tmp_path, caplog):
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    ranges = fxamp.profile(Overflows(), [x], loss_fn=lambda output: output.sum(), progress=False)
    converted = fxamp.convert(Overflows(), torch.float16, (x,), ranges=ranges)
    assert not fxamp.report(converted).rows  # no preview of what will not run
    for _ in range(3):
        converted(x).sum().backward()
    told = [record.getMessage() for record in caplog.records if "by the ranges float16 does not hold" in record.message]
    assert len(told) == 1 and "forward runs as under torch.autocast, and ranges decide" in told[0]
    (whole,) = (record.getMessage() for record in caplog.records if "was converted" in record.message)
    assert "convert(model, boundaries=['b']) converts those by themselves" in whole
    assert fxamp.report(fxamp.convert(Overflows(), torch.float16, (x,), boundaries=["b"])).coverage == 1.0

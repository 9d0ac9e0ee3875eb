"""State and order: whatever eager does besides computing, the converted model does too."""

import copy
import multiprocessing
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import fxamp
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
# Numbers for which bf16 is exact: small integers.
EXACT = torch.arange(12.0).reshape(3, 4)
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Body(nn.Module):
    """A linear layer with small integer weights, so that low precision is exact, and a body to be given."""

    def __init__(self, body) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.body = body
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4) * 2 + 1)
            self.fc.bias.copy_(torch.arange(4.0))

    def forward(self, x):
        return self.body(self, x)


def bf16(model, *example):
    return fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=example or None)


def precisions(converted, op):
    return [row.precision for row in fxamp.report(converted).rows if row.op == op]


def check_exact(body, calls=3):
    """Converted and eager give the same and leave the same buffers, exactly, call after call."""
    eager = Body(body)
    converted = bf16(Body(body), EXACT)
    for _ in range(calls):
        mine, theirs = EXACT.clone(), EXACT.clone()
        torch.testing.assert_close(converted(mine), eager(theirs), rtol=0, atol=0)
        assert torch.equal(mine, theirs)
        for (name, left), right in zip(converted.named_buffers(), eager.buffers(), strict=True):
            assert torch.equal(left, right), name
    return converted


def assert_trains_alike(make, steps=3, atol=2**-6):
    """Three steps of SGD from the same start: outputs, parameters and buffers stay near, in the same dtypes."""
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    mine = make()
    converted = bf16(mine, X)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (eager, mine)]
    for step in range(steps):
        for model, optimizer in zip((eager, converted), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(X).square().mean().backward()
            optimizer.step()
    state = mine.state_dict()
    for name, theirs in eager.state_dict().items():
        assert state[name].dtype == theirs.dtype, name
        torch.testing.assert_close(state[name], theirs, rtol=0, atol=atol)
    return converted


# ----------------------------------------------------------------------------------- reparametrized weights


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return function(*args, **kwargs)


def two_layers(wrap, **options):
    def make():
        first, last = (quietly(wrap, layer, **options) for layer in (nn.Linear(4, 8), nn.Linear(8, 4)))
        return nn.Sequential(first, nn.Tanh(), last)

    return make


def test_old_weight_norm_is_computed_from_its_parameters_each_time():
    converted = assert_trains_alike(two_layers(nn.utils.weight_norm))
    assert precisions(converted, "linear") == ["low", "low"]
    with torch.no_grad():
        converted[2].weight_g.zero_()
    assert torch.equal(converted(X), converted[2].bias.to(LOW).float().expand(6, 4))


def test_old_spectral_norm_stays_whole_and_moves_its_vectors():
    converted = assert_trains_alike(two_layers(nn.utils.spectral_norm))
    left = [row for row in fxamp.report(converted).rows if row.op == "linear"]
    assert [row.precision for row in left] == ["high", "high"]
    assert all("inside the module" in row.reason for row in left)


def test_new_weight_norm_runs_low():
    assert precisions(assert_trains_alike(two_layers(parametrizations.weight_norm)), "linear") == ["low", "low"]


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, parametrizations.orthogonal])
def test_new_parametrizations_follow_eager(wrap):
    torch.manual_seed(0)
    assert_trains_alike(two_layers(wrap), atol=2**-5)


def test_a_parametrization_of_the_users_own_is_traced_through():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    model = nn.Sequential(nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    converted = bf16(model, X)
    assert precisions(converted, "linear") == ["low"]
    torch.testing.assert_close(converted(X), model(X), rtol=0, atol=2**-5)
    with torch.no_grad():
        model[0].parametrizations.weight.original.zero_()
    assert torch.equal(converted(X), model[0].bias.to(LOW).float().expand(6, 4))


def test_pruned_weights_stay_pruned_and_the_mask_is_read_each_time():
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        return model

    converted = assert_trains_alike(make)
    converted[0].weight_mask.zero_()
    other = X + 1
    assert torch.equal(converted(X), converted(other))


# -------------------------------------------------------------------------------------- parameters and buffers


def test_tied_and_shared_weights_stay_one():
    def make():
        shared = nn.Linear(4, 4)
        model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 4))
        model[3].weight = shared.weight
        return model

    converted = assert_trains_alike(make)
    assert converted[0] is converted[2]
    assert converted[3].weight is converted[0].weight
    assert len(list(converted.parameters())) == 3


def test_frozen_and_unused_parameters_keep_no_gradient():
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    converted = bf16(Partly(), X)
    converted(X).sum().backward()
    assert [p.grad is None for p in converted.parameters()] == [False, False, True, True, True, True]
    converted.frozen.requires_grad_(True)
    converted(X).sum().backward()
    assert converted.frozen.weight.grad is not None


def test_buffers_written_in_forward_move_as_in_eager():
    def body(self, x):
        self.count += 1
        self.count.add_(1)
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        self.mean[0] = 7
        return self.fc(x) + self.count

    check_exact(body)


def test_a_buffer_that_is_replaced_is_replaced_as_in_eager():
    def body(self, x):
        self.mean = 0.5 * self.mean + x.mean(0)
        return self.fc(x) + self.mean

    check_exact(body)


def test_batch_norm_moves_once_a_call_and_conversion_moves_nothing():
    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4))

    converted = assert_trains_alike(make)
    assert int(converted[1].num_batches_tracked) == 3


def test_a_batch_norm_in_eval_mode_inside_a_training_model_stands_still():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    converted = bf16(model, X)
    converted(X)
    converted[1].eval()
    before = model[1].running_mean.clone()
    converted(X)
    assert torch.equal(model[1].running_mean, before)


# ---------------------------------------------------------------------------------- order of effects, views


def test_random_operations_draw_the_same_numbers_in_the_same_order():
    def body(self, x):
        noise = torch.rand(4) + torch.randn_like(x)
        y = F.dropout(self.fc(x) * 0 + 1, 0.5, self.training)
        return torch.stack([y, noise, torch.bernoulli(torch.full_like(x, 0.5)), torch.randperm(4).expand(3, 4).float()])

    eager, converted = Body(body), bf16(Body(body), EXACT)
    for seed in range(3):
        torch.manual_seed(seed)
        ours, mine = converted(EXACT), torch.get_rng_state()
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, eager(EXACT), rtol=0, atol=0)
        assert torch.equal(mine, torch.get_rng_state())


def test_in_place_writes_through_views_lose_nothing():
    def body(self, x):
        y = self.fc(x)
        row, column = y[0], y.T[1]
        row.mul_(2)
        column += row.sum()
        y.view(-1)[::5] = 1
        y[y > 40] = 40
        self.fc.bias.detach()[0].clone().add_(1)
        z = y.clamp_(max=30)
        y += 1
        return y, z, row

    check_exact(body)


def test_a_write_between_two_reads_is_seen_by_the_second_only():
    def body(self, x):
        y = self.fc(x)
        before = y + 0
        y.exp_()
        y.log_()
        y.zero_()
        return before, y + 1, self.fc(y)

    check_exact(body)


def test_the_input_is_written_where_eager_writes_it():
    def body(self, x):
        x[0] += 1
        y = self.fc(x)
        x.zero_()
        return y

    check_exact(body)


def test_a_protected_region_is_high_and_nested_ones_keep_their_meaning():
    def body(self, x):
        with torch.autocast("cpu", enabled=False):
            first = self.fc(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                second = self.fc(first)
            third = self.fc(second.float())
        return self.fc(third)

    converted = bf16(Body(body), EXACT)
    assert precisions(converted, "linear") == ["high", "low", "high", "low"]


def test_protection_survives_an_enabled_region_around_the_call():
    def body(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.fc(x / 3)

    eager, converted = Body(body), bf16(Body(body), EXACT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(converted(EXACT), eager(EXACT))


# --------------------------------------------------------------------------------------------------- hooks

HOOKS = {
    "forward": lambda m, note: m.register_forward_hook(lambda *_: note("forward")),
    "forward with kwargs": lambda m, note: m.register_forward_hook(lambda *_: note("forward"), with_kwargs=True),
    "pre": lambda m, note: m.register_forward_pre_hook(lambda *_: note("pre")),
    "backward": lambda m, note: m.register_full_backward_hook(lambda *_: note("backward")),
    "backward pre": lambda m, note: m.register_full_backward_pre_hook(lambda *_: note("backward pre")),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4))])
def test_hooks_on_any_module_fire_once_a_call(kind, when, layer):
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(layer), nn.Linear(4, 4))
    if when == "before":
        HOOKS[kind](model[1], seen.append)
    converted = bf16(model, X)
    converted(X).sum().backward()
    if when == "after":
        assert not seen
        HOOKS[kind](model[1], seen.append)
        converted(X).sum().backward()
    assert len(seen) == 1
    if any(isinstance(part, nn.Linear) for part in layer.modules()):
        (row,) = (row for row in fxamp.report(converted).rows if row.name == "_1")
        assert row.precision == "high"
        assert "inside the module" in row.reason


def test_a_hook_that_changes_the_result_is_obeyed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, result: result * 0)
    assert torch.equal(bf16(model, X)(X), model[1].bias.to(LOW).float().expand(6, 4))


def test_a_removed_hook_lets_the_module_in_again():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = model[0].register_forward_hook(lambda *_: None)
    converted = bf16(model, X)
    assert precisions(converted, "linear") == ["high", "low"]
    handle.remove()
    converted(X)
    assert precisions(converted, "linear") == ["low", "low"]


# ------------------------------------------------------------------------------------------ later changes


def test_an_exchanged_module_is_noticed():
    converted = bf16(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X)
    converted(X)
    converted[1] = nn.Tanh()
    torch.testing.assert_close(converted(X), converted[0](X).tanh(), rtol=0, atol=2**-6)


def test_an_added_module_is_noticed():
    model = nn.Sequential(nn.Linear(4, 4))
    converted = bf16(model, X)
    converted(X)
    converted.append(nn.Linear(4, 2))
    assert converted(X).shape == (6, 2)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4)])
def test_an_exchanged_parameter_is_noticed(shape):
    converted = bf16(nn.Sequential(nn.Linear(4, 4)), X)
    converted(X)
    converted[0].weight = nn.Parameter(torch.zeros(shape))
    converted[0].bias = nn.Parameter(torch.ones(shape[0]))
    assert torch.equal(converted(X), torch.ones(6, shape[0]))


def test_an_exchanged_dtype_is_noticed():
    converted = bf16(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), X)
    converted(X)
    converted.double()
    assert converted(X.double()).dtype == torch.float64


# -------------------------------------------------------------------------------- what is done afterwards


class Net(nn.Module):
    """Importable, so that another process can unpickle it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.fc(x))))


def _answer(sent: bytes, queue) -> None:
    torch.set_num_threads(1)
    model = pickle.loads(sent)
    result = model(X).tolist()
    queue.put((type(model).__name__, fxamp.report(model).low_precision_nodes, result))


def test_a_spawned_process_gets_a_converted_model():
    torch.manual_seed(0)
    converted = bf16(Net().eval(), X)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_answer, args=(pickle.dumps(converted), queue))
    process.start()
    name, low, result = queue.get(timeout=120)
    process.join(timeout=60)
    assert name == "Net"
    assert low == fxamp.report(converted).low_precision_nodes > 0
    assert result == converted(X).tolist()


@pytest.mark.parametrize("mode", [True, False])
def test_torch_compile_in_one_graph(mode):
    torch.manual_seed(0)
    converted = bf16(Net().train(mode), X)
    expected = converted(X)
    torch._dynamo.reset()
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), expected, rtol=0, atol=2**-7)
    compiled(X).sum().backward()
    assert converted.fc.weight.grad is not None


def test_torch_export_gives_plain_casts():
    torch.manual_seed(0)
    converted = bf16(Net().eval(), X)
    program = torch.export.export(converted, (X,))
    assert torch.equal(program.module()(X), converted(X))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names <= {f"aten.{op}.default" for op in ("to", "linear", "relu", "batch_norm", "_to_copy")} | {
        "aten.to.dtype", "aten._assert_tensor_metadata.default", "aten.linear.default",
    }, names  # fmt: skip
    assert set(program.state_dict) == set(converted.state_dict())


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("is_child", [False, True])
@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_export_holds_no_switch_of_gradients_that_a_capture_made(is_child, is_called, opt_level, mode):
    """Such switches became empty regions, which run_decompositions, and ONNX, cannot read."""
    torch.manual_seed(0)
    converted = fxamp.convert(Net().eval(), dtype=LOW, opt_level=opt_level)
    model = Around(converted) if is_child else converted
    if is_called:
        model(X)
    with mode():
        program = torch.export.export(model, (X,), strict=False)
        assert not any("grad" in str(node.target) for node in program.graph.nodes)
        assert torch.equal(program.run_decompositions({}).module()(X), model(X))


def test_a_device_that_a_call_is_made_under_is_that_of_its_capture():
    """The function modes of an export are left aside while a graph is made, and no others."""
    model = Body(lambda self, x: self.fc(x) * {"meta": 2, "cpu": 3}[torch.ones(1).device.type]).eval()
    with torch.device("meta"):
        program = torch.export.export(bf16(model).to("meta"), (X.to("meta"),), strict=False)
    assert [node.args[1] for node in program.graph.nodes if "mul" in str(node.target)] == [2]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_export_gives_cast_nodes(tmp_path, dynamo, mode):
    import onnx
    from onnx.reference import ReferenceEvaluator

    converted = fxamp.convert(Net().eval(), dtype=torch.float16, capture="symbolic")
    path = tmp_path / "net.onnx"
    with mode():
        torch.onnx.export(converted, (X,), path, dynamo=dynamo)
    exported = onnx.load(path)
    kinds = {node.op_type for node in exported.graph.node}
    assert "Cast" in kinds and kinds <= {"Cast", "Gemm", "Relu", "BatchNormalization", "MatMul", "Add", "Identity"}
    (found,) = ReferenceEvaluator(exported).run(None, {exported.graph.input[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), converted(X).detach(), rtol=2**-8, atol=2**-8)


def test_a_forward_that_is_wrapped_after_conversion():
    """As Accelerate's prepare() does: the wrapper runs, and what it wraps is the converted forward."""
    torch.manual_seed(0)
    model, calls = Net().eval(), []
    converted = bf16(model)
    inner = converted.forward

    def forward(x):
        calls.append(1)
        with torch.autocast("cpu", torch.bfloat16):
            return inner(x)

    converted.forward = forward
    torch.testing.assert_close(converted(X), model(X), rtol=0.02, atol=0.02)
    twin = copy.deepcopy(converted)
    assert torch.equal(converted(X), twin(X)) and calls
    assert set(fxamp.report(converted).captures) == {"symbolic"}


def test_torch_jit_trace_gives_plain_casts():
    converted = bf16(Net().eval(), X)
    traced = torch.jit.trace(converted, (X,))
    assert "PythonOp" not in str(traced.graph)
    assert torch.equal(traced(X), converted(X))


def test_torch_jit_trace_makes_the_graph_at_its_first_call():
    converted = bf16(Net().eval())
    traced = torch.jit.trace(converted, (X,))
    assert torch.equal(traced(X), converted(X))


@pytest.mark.parametrize("is_inside", [False, True])
def test_torch_fx_over_a_converted_model_is_refused_with_the_order_that_works(is_inside):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    converted = fxamp.convert(model)
    with pytest.raises(fxamp.CaptureError, match="Trace the model first"):
        torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), converted) if is_inside else converted)
    x = torch.randn(2, 4)
    assert fxamp.convert(torch.fx.symbolic_trace(model))(x).equal(converted(x))


def test_an_exported_program_is_converted():
    torch.manual_seed(0)
    model = Net().eval()
    program = torch.export.export(model, (X,))
    converted = bf16(program, X)
    report = fxamp.report(converted)
    assert {row.op: row.precision for row in report.rows if row.op in ("linear", "batch_norm")}["linear"] == "low"
    assert "aten" not in {row.op.partition(".")[0] for row in report.rows}
    torch.testing.assert_close(converted(X), model(X), rtol=0.02, atol=0.02)
    assert set(converted.state_dict()) == set(model.state_dict())


def test_an_exported_program_that_converts_is_converted():
    """torch.export asserts the float32 of what is converted."""

    class Converts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(self.first(x).float().exp().to(torch.float32))

    torch.manual_seed(0)
    model, x = Converts().eval(), torch.randn(4, 8)
    converted = fxamp.convert(torch.export.export(model, (x,)), torch.bfloat16, example_inputs=(x,))
    rows = [(row.op, row.precision) for row in fxamp.report(converted).rows if row.op in ("linear", "exp")]
    assert rows == [("linear", "low"), ("exp", "high"), ("linear", "high")], "what is cast to float32 stays so"
    torch.testing.assert_close(converted(x), model(x), rtol=0.02, atol=0.02)


def test_graphs_are_shared_by_copies_and_states_are_not():
    converted = bf16(Net(), X)
    twin = copy.deepcopy(converted)
    twin(X)
    assert int(twin.norm.num_batches_tracked) == 1
    assert int(converted.norm.num_batches_tracked) == 0
    assert engine_of(twin) is not None


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("capture", ["symbolic", "auto"])
def test_the_first_call_in_a_mode_may_be_made_under_inference_mode(level, capture):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    converted = fxamp.convert(net, torch.bfloat16, opt_level=level, capture=capture)
    converted(X).sum().backward()
    converted.eval()
    with torch.inference_mode():
        seen = converted(X)
        assert seen.is_inference()
        given = X.clone()
        assert torch.equal(converted(given), seen)
    assert torch.equal(converted(X), seen)
    assert [variant.captured.method for variant in engine_of(converted).graphs()] == ["symbolic", "symbolic"]
    converted.train()(X).sum().backward()
    converted.eval()(X).sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in net.parameters())


def test_converted_under_inference_mode_and_trained_afterwards():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with torch.inference_mode():
        converted = bf16(net, X.clone())
        seen = converted(X.clone())
    assert torch.equal(converted(X), seen)
    converted(X).sum().backward()
    assert net[0].weight.grad is not None


class AsksForInference(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) * (2 if torch.is_inference_mode_enabled() else 1)


def test_forward_that_asks_for_inference_mode_is_left_to_dynamo():
    torch.manual_seed(0)
    net = AsksForInference()
    converted = fxamp.convert(net, torch.bfloat16)
    for mode in (False, True, False):
        with torch.inference_mode(mode):
            torch.testing.assert_close(converted(X), net(X), rtol=2**-7, atol=2**-6)
    with pytest.raises(fxamp.CaptureError, match=r"test_order\.py.*is_inference_mode_enabled"):
        fxamp.convert(net, torch.bfloat16, capture="symbolic", example_inputs=(X,))


def test_weights_that_are_cached_for_a_while_are_computed_once():
    torch.manual_seed(0)
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    twin = copy.deepcopy(net)
    converted = fxamp.convert(twin, torch.bfloat16, overrides={"**": "deny"})
    for _ in range(2):
        for model in (net, converted):
            with parametrize.cached():
                for _ in range(5):
                    result = model(X)
        torch.testing.assert_close(net(X), converted(X), rtol=0, atol=0)
        assert torch.equal(net[0].parametrizations.weight[0]._u, twin[0].parametrizations.weight[0]._u)
    assert result.dtype == torch.float32


def test_calls_whose_dictionaries_have_other_keys_or_another_order_are_other_calls():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, parts, **more):
            given = {**parts, **more}
            return self.first(given["a"]) - self.second(given.get("b", given["a"])) + len(given.get("c", ()))

    torch.manual_seed(0)
    model = Parts()
    a, b = torch.randn(2, 4), torch.randn(2, 4)
    converted = bf16(copy.deepcopy(model), {"a": a, "b": b})
    calls = [
        (({"a": a, "b": b},), {}),
        (({"b": b, "a": a},), {}),
        (({"a": a, "c": b},), {}),
        (({"a": a},), {"b": b}),
        (({"a": a},), {"c": b}),
    ]
    for _ in range(2):
        for args, kwargs in calls:
            torch.testing.assert_close(converted(*args, **kwargs), model(*args, **kwargs), rtol=0.02, atol=0.02)

"""A forward that asks its data nothing where it is traced is told that it is not; but in calls that are recorded."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp import recorded
from fxamp.errors import OptionError
from fxamp.model.engine import Engine, engine_of
from fxamp.runtime.graphed_step import WARM_UP
from fxamp.weight_fits import fit_of_weight
from tests.runtime.simulated_graph import READS_DEVICE, SimulatedGraphs

X = torch.randn(2, 6, 8)
SOME, ALL = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]), torch.ones(2, 6, dtype=torch.long)


def is_traced(tensor):
    """As transformers asks: everything."""
    return any([torch.compiler.is_compiling(), torch.jit.is_tracing(), isinstance(tensor, fx.Proxy), is_fake(tensor)])


def is_fake(tensor):
    return isinstance(tensor, FakeTensor)


def of_inputs(_, __, mask):
    return mask.bool()


def of_layers(model, x, mask):
    """What a layer has computed hangs on more than inputs."""
    return mask.bool() & (model.qkv(x).sum(-1) < 1e9)


class Attending(nn.Module):
    """Attention whose mask is dropped where it hides nothing."""

    def __init__(self, find=of_inputs) -> None:
        super().__init__()
        self.qkv, self.out, self.find = nn.Linear(8, 24), nn.Linear(8, 8), find

    def forward(self, x, mask=None):
        if mask is not None:
            mask = self.find(self, x, mask)
            mask = None if not is_traced(mask) and mask.all() else mask[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(found.transpose(1, 2).flatten(2))


def _converted(find=of_inputs, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = Attending(find)
    return model, fxamp.convert(copy.deepcopy(model), dtype, **options)


def _agree(model, converted, *call):
    expected, found = model(*call), converted(*call)
    assert 0 < (found - expected).norm() < expected.norm() * 2**-5


def _masked(converted):
    """Of each graph, whether its attention has a mask."""
    nodes = [
        [n for n in variant.graph.nodes if "attention" in n.name] for variant in engine_of(converted).all_variants()
    ]
    return [found[0].kwargs["attn_mask"] is not None for found in nodes]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_mask_that_hides_nothing_is_dropped(level):
    model, converted = _converted(opt_level=level)
    for mask in (ALL, SOME, ALL, SOME, torch.cat([SOME, ALL])[:, :5]):
        _agree(model, converted, X.repeat(len(mask) // 2, 1, 1)[:, : mask.shape[1]], mask)
    assert _masked(converted) == [False, True]


def test_example_inputs_show_it():
    _, converted = _converted(example_inputs=(X, ALL))
    assert _masked(converted) == [False]


def test_a_mask_that_layers_make_is_kept():
    """What cannot be asked would leave the call to others: forward is told that it is traced."""
    model, converted = _converted(of_layers)
    for mask in (ALL, SOME, ALL):
        _agree(model, converted, X, mask)
    assert _masked(converted) == [True]


def test_what_only_warns_asks_nothing():
    """transformers looks for padding in what it is given without a mask."""

    class Warning(Attending):
        def __init__(self) -> None:
            super().__init__()
            self.found = []

        def warn(self, x):
            if is_traced(x):
                return
            if (x[:, [-1, 0]] == 0).any():
                self.found.append("padding")

        def forward(self, x, mask=None):
            self.warn(x)
            return super().forward(x, mask)

    model = Warning()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for x in (X, torch.zeros_like(X)):
        _agree(model, converted, x)
    (variant,) = engine_of(converted).all_variants()
    assert variant.captured.data is None and variant.captured.answers.is_recorded is None


def test_a_call_without_data_keeps_it():
    model, converted = _converted()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        converted(mode.from_tensor(X), mode.from_tensor(ALL))
    for mask in (ALL, SOME):
        _agree(model, converted, X, mask)


def test_whoever_captures_it_again_goes_the_same_way():
    model, converted = _converted()
    for mask in (ALL, SOME):
        converted(X, mask)
    denied = fxamp.what_if(converted, deny=["linear"])
    for op in ("expand", "getitem"):  # of the mask
        assert sum(row.op == op for row in denied.rows) == sum(row.op == op for row in fxamp.report(converted).rows)
    assert {row.precision for row in denied.rows if row.op == "linear"} == {"high"}
    assert fxamp.compare(model, converted, (X, ALL)).output < 2**-5
    assert _masked(converted) == [False, True]


@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile_has_one_graph_which_keeps_it():
    model, converted = _converted()
    _agree(model, converted, X, ALL)
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    for mask in (ALL, SOME):
        _agree(model, compiled, X, mask)
    _agree(model, converted, X, ALL)
    assert _masked(converted) == [False, True]
    made = engine_of(converted).all_variants()
    assert [variant.captured.answers.is_recorded for variant in made] == [False, True]


@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_exported_or_traced_keeps_it(is_known):
    model, converted = _converted()
    if is_known:
        _agree(model, converted, X, ALL)
    exported = torch.export.export(converted, (X, ALL), strict=False).module()
    traced = torch.jit.trace(converted, (X, ALL))
    for made in (exported, traced):
        _agree(model, made, X, SOME)


class Reads(TorchDispatchMode):
    """Notes what would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS_DEVICE and not any(isinstance(each, FakeTensor) for each in args):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_graph_for_recorded_calls_is_made_without_a_look_at_the_device(monkeypatch):
    """The user's own CUDA graph around a model that was called before, and has been trained since."""
    model, converted = _converted(dtype=torch.float16)
    optimizer = torch.optim.SGD(converted.parameters(), 0.1)
    converted(X, ALL).sum().backward()
    optimizer.step()
    model.load_state_dict(converted.state_dict())
    monkeypatch.setattr(recorded, "_is_cuda_capturing", lambda: True)
    monkeypatch.setattr(recorded, "is_capturing", lambda device: True)
    build, reads = Engine._build, Reads()

    def watched(*args):
        with reads:
            return build(*args)

    monkeypatch.setattr(Engine, "_build", watched)
    random = torch.ops.aten.equal.default  # of the generator's state, which is the host's
    with reads:
        _ = converted(X, SOME)
    assert set(reads.found) <= {str(random)}
    monkeypatch.undo()
    assert _masked(converted) == [False, True]
    with recorded.as_if_recorded():
        _agree(model, converted, X, SOME)
        _agree(model, converted, X, ALL)
    assert _masked(converted) == [False, True]


def test_a_weight_that_no_graph_has_looked_at_is_not_looked_at_while_recorded(monkeypatch):
    weight = nn.Parameter(torch.full((8,), 1e-6))
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "is_capturing", lambda device: True)
        with pytest.raises(OptionError, match=r"'scale'.*Call the model once before"):
            fit_of_weight("scale", weight, torch.float16)
    for is_capturing in (False, True):
        monkeypatch.setattr(recorded, "is_capturing", lambda device, held=is_capturing: held)
        assert fit_of_weight("scale", weight, torch.float16) == "small"


def test_a_step_that_is_recorded_keeps_it(monkeypatch):
    _, converted = _converted(dtype=torch.float16)
    optimizer = torch.optim.AdamW(converted.parameters(), 0.01, fused=True)
    converted(X, ALL)
    step = SimulatedGraphs(monkeypatch).step_for(
        converted, lambda found, _: found.square().mean(), optimizer, fxamp.LossScaler(2.0**8)
    )
    for mask in (*[ALL] * (WARM_UP + 1), SOME, ALL):
        twin = Attending()
        twin.load_state_dict(converted.state_dict())
        expected = twin(X, mask).square().mean()
        assert (step({"x": X, "mask": mask}, X) - expected).abs() < expected * 2**-5
    assert step.is_graphed and _masked(converted) == [False, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_a_cuda_graph_around_a_model_keeps_it(dtype):
    model, converted = _converted(dtype=dtype)
    model, converted, x, full, some = (each.cuda() for each in (model, converted, X, ALL, SOME))
    _agree(model, converted, x, full)  # a graph of the model's without the mask; the next one is made while recorded
    mask, graph = full.clone(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = converted(x, mask)
    for now in (some, full):
        mask.copy_(now)
        graph.replay()
        expected = model(x, now)
        assert (found - expected).norm() < expected.norm() * 2**-5
    assert _masked(converted) == [False, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_step_that_is_recorded_keeps_it():
    _, converted = _converted(dtype=torch.float16)
    x, full, some = (each.cuda() for each in (X, ALL, SOME))
    optimizer = torch.optim.AdamW(converted.cuda().parameters(), 0.01, fused=True)
    converted(x, full)
    step = fxamp.GraphedStep(converted, lambda found, _: found.square().mean(), optimizer, fxamp.LossScaler(2.0**8))
    for mask in (*[full] * (WARM_UP + 1), some, full):
        twin = Attending().cuda()
        twin.load_state_dict(converted.state_dict())
        expected = twin(x, mask).square().mean()
        assert (step({"x": x, "mask": mask}, x) - expected).abs() < expected * 2**-5
    assert step.is_graphed and _masked(converted) == [False, True]

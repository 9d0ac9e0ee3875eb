"""A skipped step must leave no trace, whatever an optimizer keeps, and no step may wait for the device."""

import copy
import math
import pickle

import pytest
import torch
from runtime_instruments import NoSync, ThirdParty

from fxamp.runtime import device_skip, flat_copies, layouts
from fxamp.runtime.copies import Skipped
from fxamp.runtime.device_skip import settle, step_unless
from fxamp.runtime.flat_copies import FlatCopies
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.snapshot import LAYOUTS, Snapshot

SYNC_FREE = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "fused_sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "fused_adam": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "third_party": lambda p: ThirdParty(p, 0.1),
    "masters": lambda p: MasterWeightOptimizer(torch.optim.SGD(p, 0.1, momentum=0.9)),
    "fused_masters": lambda p: MasterWeightOptimizer(torch.optim.AdamW(p, 0.1, fused=True), bucket_bytes=1),
}


@pytest.fixture(params=[False, True], ids=["as_on_a_gpu", "host_flag"])
def way_to_skip(request, monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", request.param)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("kind", SYNC_FREE)
@pytest.mark.parametrize("options", [{}, {"hysteresis": 2}, {"process_group": None, "max_scale": 2.0**20}])
def test_no_step_waits_for_the_device(kind, options):
    dtype = torch.bfloat16 if "masters" in kind else torch.float32
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)
    optimizer, scaler = SYNC_FREE[kind](model.parameters()), LossScaler(**options)
    skipped = []
    for factor in (math.nan, 1.0, math.inf, 1.0):
        optimizer.zero_grad()
        inputs = torch.ones(2, 3, dtype=dtype) * factor
        with NoSync():
            scaler.scale(model(inputs).float().sum()).backward()
            result = scaler.step(optimizer, max_grad_norm=1.0)
            scaler.update()
        skipped.append(result.skipped)
    assert skipped == [True, False, True, False]


def test_the_instrument_that_forbids_syncs_works():
    with NoSync(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(()).item()
    weight = torch.nn.Parameter(torch.ones(1))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], 0.1)
    scaler.scale(weight.sum()).backward()
    with NoSync(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        scaler.step(optimizer)


class HostState(torch.optim.Optimizer):
    """State of every kind: created late, nested, grown, replaced, in the group, under a plain key."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 1, "window": [1, 2], "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] *= 2
            group["window"] = [*group["window"], group["k"]]
            group["betas"] = (group["betas"][0] / 2, 0.99)
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["history"] = [*state.get("history", []), p.grad.clone()][-2:]
                state.setdefault("nested", {"mean": torch.zeros_like(p)})["mean"].add_(p.grad)
                state["shape"] = torch.ones(state["count"])
                state.pop("first", None)
                if state["count"] == 1:
                    state["first"] = True
                p.sub_(p.grad + state["nested"]["mean"])
        self.state["global"] = {"steps": self.state.get("global", {}).get("steps", 0) + 1}


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("good_before", [0, 1, 3])
def test_skipped_step_leaves_no_trace_in_any_kind_of_state(good_before):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = HostState([weight])

    def step(found_inf):
        device_skip.settle(optimizer)
        weight.grad = torch.tensor([0.5, math.nan if found_inf else 0.25])
        device_skip.step_unless(optimizer, torch.tensor(float(found_inf)), optimizer.step)

    for _ in range(good_before):
        step(False)
    before = copy.deepcopy(optimizer.state_dict()), weight.tolist()
    step(True)
    assert weight.tolist() == before[1]
    torch.testing.assert_close(optimizer.state_dict(), before[0], rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"] == before[0]["param_groups"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_learning_rate_set_after_a_skipped_step_stands():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = HostState([weight])
    weight.grad = torch.ones(1)
    device_skip.step_unless(optimizer, torch.ones(()), optimizer.step)
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.param_groups[0]["k"] = 77
    device_skip.settle(optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["k"]) == (0.01, 77)
    assert optimizer.param_groups[0]["window"] == [1, 2]


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "old pickle": lambda pair: pickle.loads(pickle.dumps(pair, protocol=0)),
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
@pytest.mark.parametrize("kind", [*SYNC_FREE, "host_state", "adam"])
@pytest.mark.parametrize("good_before", [0, 1])
def test_a_copy_made_right_after_a_skipped_step_is_that_of_before_it(good_before, kind, copier):
    made = {**SYNC_FREE, "host_state": HostState, "adam": lambda p: torch.optim.Adam(p, 0.1)}[kind]
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16 if "masters" in kind else torch.float32))
    optimizer, scaler = made([weight]), LossScaler(64.0)

    def step(weight, optimizer, factor):
        optimizer.zero_grad()
        scaler.scale((weight * factor).float().sum()).backward()
        scaler.step(optimizer)

    for factor in [1.0] * good_before + [math.inf]:
        step(weight, optimizer, factor)
        scaler.update()
    pairs = copier((weight, optimizer)), (weight, optimizer)
    copied, original = (pair[1].state_dict() for pair in pairs)
    torch.testing.assert_close(copied, original, rtol=0, atol=0)
    for pair in pairs:
        step(*pair, 2.0)
    copied, original = (pair[1].state_dict() for pair in pairs)
    torch.testing.assert_close(copied, original, rtol=0, atol=0)
    assert torch.equal(pairs[0][0], weight) and weight.isfinite().all()


class Opaque(torch.optim.SGD):
    """Keeps an object that cannot be compared, so the host decides."""

    def step(self, closure=None):
        self.state["table"] = self.state.get("table") or object.__new__(Opaque)
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


@pytest.mark.usefixtures("way_to_skip")
def test_opaque_state_is_decided_by_the_host():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Opaque([weight], 0.5)
    optimizer.state["table"] = object()
    weight.grad = torch.ones(1)
    for found_inf in (1.0, 0.0, 1.0):
        device_skip.step_unless(optimizer, torch.tensor(found_inf), optimizer.step)
    assert (optimizer.steps, weight.tolist()) == (1, [0.5])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_fused_sgd_does_not_read_an_uninitialised_momentum_buffer():
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.SGD([weight], 1.0, momentum=0.9, dampening=0.5, fused=True)
    for found_inf in (1.0, 0.0):
        device_skip.settle(optimizer)
        weight.grad = torch.ones(4096)
        device_skip.step_unless(optimizer, torch.tensor(found_inf), optimizer.step)
        buffer = optimizer.state[weight]["momentum_buffer"]
        assert torch.equal(buffer, torch.zeros(4096) if found_inf else torch.ones(4096))
    assert torch.equal(weight, -torch.ones(4096))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_selection_is_exact_for_every_pattern(dtype, flag, count):
    """All 16-bit patterns in every position of a word, NaNs among them."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = torch.arange(-(2**15), 2**15)
    held = [(bits * 2**shift).to(integer) for shift in (0, 16, 40)[:count]]
    tensors = [part.view(dtype) for part in held]
    before = [part.clone() for part in held]
    copies = FlatCopies(tensors)
    for part in held:
        part.copy_(part.flip(0))
    now = [part.clone() for part in held]
    assert all(torch.equal(copies.value_of(each).view(integer), old) for each, old in zip(tensors, before, strict=True))
    copies.select_back(Skipped(torch.tensor(float(flag))))
    for part, wanted in zip(held, before if flag else now, strict=True):
        assert torch.equal(part, wanted)


def test_copies_come_in_pieces(monkeypatch):
    monkeypatch.setattr(layouts, "CHUNK_BYTES", 64)
    tensors = [torch.full(shape, float(n)) for n, shape in enumerate(((), (5,), (30, 2), (0, 3), (7,), (2, 2, 2)))]
    tensors.append(torch.ones(3, dtype=torch.float64))
    expected = [each.clone() for each in tensors]
    copies = FlatCopies(tensors)
    assert len(copies._copied) > 3
    for each in tensors:
        each.add_(1)
    copies.select_back(Skipped(torch.tensor(1.0)))
    assert all(map(torch.equal, tensors, expected))


def bytes_held(optimizer):
    return vars(optimizer)[LAYOUTS].held_bytes


def kept_pieces(optimizer):
    """(Not their views: whoever holds one of these keeps its memory.)"""
    return [piece for pieces in vars(optimizer)[LAYOUTS]._of.values() for piece in pieces]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_between_steps_views_are_kept_and_no_bytes():
    weights = [torch.ones(3, n, requires_grad=True) for n in (4, 5)]
    optimizer = torch.optim.AdamW(weights, foreach=True, capturable=False)
    seen = []
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        step_unless(optimizer, torch.tensor(0.0), optimizer.step)
        assert bytes_held(optimizer) == 0
        seen.append(kept_pieces(optimizer))
    assert seen[1] == seen[2] != seen[0]  # the first step had no state yet
    assert not any(piece.is_left for piece in seen[2])
    twin = copy.deepcopy(vars(optimizer)[LAYOUTS])
    assert not twin._of


@pytest.mark.usefixtures("as_on_a_gpu")
def test_views_are_kept_also_where_an_optimizer_replaces_its_state():
    weight = torch.ones(3, requires_grad=True)
    optimizer, seen = ThirdParty([weight], 0.1), []
    for flag in (0.0, 0.0, 1.0, 0.0):
        weight.grad = torch.ones(3)
        settle(optimizer)
        step_unless(optimizer, torch.tensor(flag), optimizer.step)
        seen.append(kept_pieces(optimizer))
    assert seen[1] == seen[2] == seen[3] and bytes_held(optimizer) == 0


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("kind", "told"), [(torch.optim.AdamW, 1), (torch.optim.RMSprop, 0)])
def test_an_optimizer_that_could_be_fused_says_so_once(kind, told, caplog):
    caplog.set_level("INFO", "fxamp")
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = kind([weight], 0.1)
    for _ in range(2):
        step_unless(optimizer, torch.tensor(0.0), optimizer.step)
    assert caplog.text.count(f"{kind.__name__}(fused=True) takes less time") == told


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_that_fails_holds_no_copies():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no")

    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = Failing([weight], 0.1)
    with pytest.raises(ValueError, match="no"):
        step_unless(optimizer, torch.tensor(0.0), optimizer.step)
    assert bytes_held(optimizer) == 0


@pytest.mark.usefixtures("as_on_a_gpu")
def test_copies_that_do_not_fit_leave_nothing_behind(monkeypatch):
    plain = flat_copies.own_copies

    def own_copies(tensors):
        if tensors:
            raise torch.OutOfMemoryError
        return plain(tensors)

    weights = [torch.ones(3, requires_grad=True), torch.ones(2, 3).t().requires_grad_()]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD(weights, 1.0)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(flat_copies, "own_copies", own_copies)
        step_unless(optimizer, torch.tensor(0.0), optimizer.step)
    assert bytes_held(optimizer) == 0 and torch.equal(weights[0], torch.ones(3))
    step_unless(optimizer, torch.tensor(0.0), optimizer.step)
    assert torch.equal(weights[0], torch.zeros(3))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("flags", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_a_step_inside_of_a_step_has_copies_of_its_own(flags):
    """An optimizer of apex.amp that is given to a scaler."""
    outer, inner = flags
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], 1.0)

    def both():
        step_unless(optimizer, torch.tensor(inner), optimizer.step)
        with torch.no_grad():
            weight.add_(8.0)

    for step in range(2):
        before = weight.detach().clone()
        step_unless(optimizer, torch.tensor(outer), both)
        assert torch.equal(weight, before if outer else before + 8.0 - (1.0 - inner)), step
    assert bytes_held(optimizer) == 0


@pytest.mark.usefixtures("as_on_a_gpu")
def test_ever_other_shapes_keep_few_layouts(monkeypatch):
    monkeypatch.setattr(layouts, "KEPT_VIEWS", 3)
    weights = [torch.ones(n, requires_grad=True) for n in range(1, 9)]
    optimizer = torch.optim.SGD(weights, 1.0)
    for flag in (0.0, 1.0):
        for weight in weights:
            optimizer.zero_grad()
            weight.grad = torch.ones_like(weight)
            step_unless(optimizer, torch.tensor(flag), optimizer.step)
            assert sum(len(piece.views) for piece in kept_pieces(optimizer)) <= 3 + 2
    assert all(torch.equal(weight, torch.zeros_like(weight)) for weight in weights)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_key_that_takes_the_place_of_another_is_undone(kind):
    class Renaming(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["new"] = state.pop("old")

    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizer = Renaming(weights)
    held = [torch.full((2,), float(n)) if kind == "tensor" else n for n in range(2)]
    for weight, value in zip(weights, held, strict=True):
        weight.grad = torch.ones(2)
        optimizer.state[weight]["old"] = value
    step_unless(optimizer, torch.tensor(1.0), optimizer.step)
    settle(optimizer)
    for weight, value in zip(weights, held, strict=True):
        (found,) = optimizer.state[weight].items()
        assert found[0] == "old" and bool(torch.as_tensor(found[1] == value).all())


def test_state_on_the_host_is_put_back_by_it():
    """Adam's `step` beside CUDA parameters: nobody reads the flag for it; where nothing changed nothing is put back."""
    weights = [torch.ones(3, requires_grad=True) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, foreach=True)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    expected = copy.deepcopy([optimizer.state[weight] for weight in weights])
    before = Snapshot(optimizer, torch.device("cuda"))
    before.select_back(torch.tensor(0.0))
    assert not before.host_changes()
    before = Snapshot(optimizer, torch.device("cuda"))
    optimizer.step()
    optimizer.state[weights[1]]["step"] = torch.tensor(7.0)  # another object
    del optimizer.state[weights[2]]["step"]
    before.select_back(torch.tensor(1.0))
    for undo in before.host_changes():
        undo()
    for weight, state in zip(weights, expected, strict=True):
        assert optimizer.state[weight].keys() == state.keys()
        assert all(torch.equal(optimizer.state[weight][key], value) for key, value in state.items())


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_has_strides_is_selected_by_itself():
    """A channels-last weight, its state, and an optimizer that puts new tensors into its state."""

    class New(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                state.setdefault("kept", torch.zeros_like(parameter)).add_(parameter.grad)
                parameter.data.sub_(state["sum"])

    weights = [torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(3)]
    optimizer = New([weight.requires_grad_() for weight in weights])
    for flag in (0.0, 1.0, 0.0):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        settle(optimizer)
        step_unless(optimizer, torch.tensor(flag), optimizer.step)
    settle(optimizer)
    for weight in weights:
        assert torch.equal(weight, torch.full_like(weight, 1.0 - 1 - 2))
        assert all(torch.equal(value, torch.full_like(weight, 2.0)) for value in optimizer.state[weight].values())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("exchanges", ["two buffers", "a buffer and the parameter"])
def test_an_exchange_of_memory_is_undone(exchanges):
    """Two buffers take turns (`p.data, buffer = buffer, p.data`): each place gets back what stood in it."""

    class Exchanging(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["old"].mul_(2).add_(parameter.grad)
                if exchanges == "two buffers":
                    state["old"], state["new"] = state["new"], state["old"]
                else:
                    parameter.data, state["old"] = state["old"], parameter.data

    weights = [torch.full((3,), 5.0), torch.ones(2, 3).t()]
    optimizer = Exchanging([weight.requires_grad_() for weight in weights])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
        optimizer.state[weight].update(old=torch.zeros_like(weight), new=torch.full_like(weight, 7.0))
    expected = [(weight.detach().clone(), copy.deepcopy(optimizer.state[weight])) for weight in weights]
    step_unless(optimizer, torch.tensor(1.0), optimizer.step)
    settle(optimizer)
    for weight, (value, state) in zip(weights, expected, strict=True):
        assert torch.equal(weight, value)
        assert all(torch.equal(optimizer.state[weight][key], state[key]) for key in state)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_stands_twice_hides_no_state():
    class Counting(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})
            self.state["calls"] = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.state["calls"] += 1
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                parameter.sub_(self.state[parameter]["sum"])

    weight = torch.ones(2, requires_grad=True)
    optimizer = Counting([weight, weight])
    for flag, calls in ((0.0, 1), (1.0, 1), (0.0, 2)):
        weight.grad = torch.ones(2)
        settle(optimizer)
        before = weight.detach().clone()
        step_unless(optimizer, torch.tensor(flag), optimizer.step)
        settle(optimizer)
        assert optimizer.state["calls"] == calls
        assert torch.equal(weight, before) == (flag > 0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_parameter_that_is_given_new_memory_is_undone():
    class Rebinding(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data - parameter.grad

    weights = [torch.ones(3), torch.ones(2, 3).t()]
    optimizer = Rebinding([weight.requires_grad_() for weight in weights])
    for flag, expected in ((0.0, 0.0), (1.0, 0.0), (0.0, -1.0)):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        settle(optimizer)
        step_unless(optimizer, torch.tensor(flag), optimizer.step)
        assert all(torch.equal(weight, torch.full_like(weight, expected)) for weight in weights)


def test_a_weight_with_strides_on_the_host_is_undone_beside_a_flag_on_a_device():
    weight = torch.ones(2, 3).t().requires_grad_()
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], 1.0)
    before = Snapshot(optimizer, torch.device("cuda"))
    optimizer.step()
    before.select_back(torch.tensor(1.0))
    assert torch.equal(weight, torch.ones(3, 2))


UNFUSED = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "capturable adam": lambda p: torch.optim.Adam(p, 0.1, foreach=True, capturable=p[0].is_cuda),
    "adam, one by one": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
}


def after_skips(kind, scaler, device):
    """Parameters and state after twelve steps, of which some overflow, the first among them."""
    torch.manual_seed(0)
    weights = [torch.randn(shape, device=device) for shape in ((3, 4), (5,), (), (0,))]
    weights.append(torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last))
    optimizer = UNFUSED[kind]([weight.requires_grad_() for weight in weights])
    scaler.scale(torch.ones((), device=device))
    bad = [torch.tensor(number in (0, 1, 4, 9), device=device) for number in range(12)]
    if isinstance(scaler, LossScaler) and device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for is_bad in bad:
            for weight in weights:
                weight.grad = torch.where(is_bad, math.inf, torch.full_like(weight, 0.5))
            scaler.step(optimizer)
            scaler.update()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    settle(optimizer)
    state = [value for weight in weights for value in optimizer.state[weight].values()]
    return [*weights, *state, torch.tensor(scaler.get_scale())]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
@pytest.mark.parametrize("kind", UNFUSED)
def test_an_unfused_optimizer_is_where_torchs_scaler_leaves_it(kind, device):
    """On a GPU without waiting for it once."""
    ours = after_skips(kind, LossScaler(2.0**4, growth_interval=3, device=device), device)
    theirs = after_skips(kind, torch.amp.GradScaler(device, init_scale=2.0**4, growth_interval=3), device)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_older_contract_with_a_grad_scaler_argument_is_not_trusted_to_skip():
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            return super().step(closure)

    assert not device_skip.takes_found_inf(Old([torch.nn.Parameter(torch.ones(1))], 0.1))
    assert device_skip.takes_found_inf(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], fused=True))


# --------------------------------------------------------------------------------------- optimizers of other packages


class CountsInItsGroup(torch.optim.Optimizer):
    """Adam with one counter for a group, made in the first step, as most of other packages are written."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("seen", []).append(group["step"])
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad.float(), 0.1)
                p.sub_(group["lr"] * mean / (1 - 0.9 ** group["step"]))


class CountsOnItself(torch.optim.SGD):
    """Its counters and its memory are attributes, one made late."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.total_steps, self.memory, self.every = 0, {}, list(self.param_groups[0]["params"])

    def step(self, closure=None):
        self.total_steps += 1
        self.late = getattr(self, "late", 0) + 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.memory["sum"] = self.memory.get("sum", torch.zeros(())) + p.grad.float().sum()
        self.param_groups[0]["lr"] = 1.0 / self.total_steps / self.late
        return super().step(closure)


class Decomposes(torch.optim.SGD):
    """As Shampoo and SOAP: a decomposition, which raises at numbers that are not finite."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            gradient = (p.grad.to_dense() if p.grad.is_sparse else p.grad).float()
            state = self.state[p]
            state["covariance"] = state.get("covariance", torch.zeros(2, 2)) + gradient.T @ gradient
            vectors, _, _ = torch.linalg.svd(state["covariance"])
            p.sub_(0.1 * gradient @ vectors.abs())


OTHER_PACKAGES = {"group": CountsInItsGroup, "itself": CountsOnItself, "decomposes": Decomposes}


def trained_on(make, scaler, factors, dtype=torch.float32):
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=dtype))
    optimizer = make([weight])
    results = []
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((weight.float().square() * factor).sum()).backward()
        results.append(scaler.step(optimizer))
        scaler.update()
    optimizer.state_dict()
    return weight, getattr(optimizer, "optimizer", optimizer), results


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("kind", OTHER_PACKAGES)
@pytest.mark.parametrize("bad", [(0,), (2,), (0, 1, 3)])
def test_optimizers_of_other_packages_are_what_they_are_under_torchs_scaler(kind, masters, bad):
    make, dtype = OTHER_PACKAGES[kind], torch.bfloat16 if masters else torch.float32
    wrapped = (lambda params: MasterWeightOptimizer(make(params))) if masters else make
    factors = [math.nan if index in bad else 1.0 for index in range(5)]
    weight, optimizer, results = trained_on(wrapped, LossScaler(16.0), factors, dtype)
    good = [1.0] * (5 - len(bad))
    expected, plain, _ = trained_on(wrapped, torch.amp.GradScaler("cpu", 16.0, enabled=False), good, dtype)
    assert [result.skipped for result in results] == [index in bad for index in range(5)]
    assert torch.equal(weight, expected)
    for name in ("total_steps", "late", "memory"):
        assert getattr(optimizer, name, None) == getattr(plain, name, None)
    ours, theirs = optimizer.param_groups[0], plain.param_groups[0]
    assert {**ours, "params": 0} == {**theirs, "params": 0}


class Counter:
    count = 0


class KeepsAnObject(torch.optim.SGD):
    """As SPAM, with a schedule of its own: the object cannot be copied and compared, so the host decides."""

    def __init__(self, params):
        super().__init__(params, 0.1)
        self.warmup, self.seen = Counter(), set()

    def step(self, closure=None):
        self.warmup.count += 1
        self.param_groups[0]["lr"] = 1.0 / self.warmup.count
        return super().step(closure)


@pytest.mark.usefixtures("way_to_skip")
def test_an_object_that_an_optimizer_keeps_sees_no_step_that_is_skipped():
    weight, optimizer, _ = trained_on(KeepsAnObject, LossScaler(16.0), [math.nan, 1.0, math.inf, 1.0])
    expected, plain, _ = trained_on(KeepsAnObject, torch.amp.GradScaler("cpu", enabled=False), [1.0, 1.0])
    assert torch.equal(weight, expected) and optimizer.warmup.count == plain.warmup.count == 2


class KeepsASet(KeepsAnObject):
    def __init__(self, params):
        super().__init__(params)
        self.warmup = None

    def step(self, closure=None):
        self.seen.add(len(self.seen))
        self.param_groups[0]["lr"] = 1.0 / len(self.seen)
        return torch.optim.SGD.step(self, closure)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_set_that_an_optimizer_keeps_is_put_back_without_waiting():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = KeepsASet([weight]), LossScaler(2.0, device="cpu")
    for factor in (1.0, math.nan):
        weight.grad = torch.full((2,), factor)
        with NoSync():
            scaler.step(optimizer)
            scaler.update()
    optimizer.state_dict()
    assert optimizer.seen == {0} and weight.tolist() == [0.5, 0.5]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_gradients_of_a_skipped_step_are_still_there_to_be_named(is_sparse):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer, scaler = Decomposes([weight], 0.1), LossScaler(2.0, device="cpu")
    gradient = torch.tensor([[math.nan, 1.0], [0.0, 2.0]])
    weight.grad = gradient.to_sparse(1) if is_sparse else gradient
    given = weight.grad
    result = scaler.step(optimizer)
    assert result.skipped and weight.grad is given and len(result.nonfinite) == 1


class Around(torch.optim.Optimizer):
    """As Lookahead of pytorch_optimizer: no Optimizer.__init__, groups and state of the optimizer that it is around."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        self.calls += 1
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()


class Beside(torch.optim.Optimizer):
    """As davda54's SAM: groups of the optimizer that it is around, and a state of its own."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.base, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("around", [Around, Beside])
@pytest.mark.parametrize("bad", [(), (0,), (2,)])
def test_an_optimizer_around_another_is_what_it_is_under_torchs_scaler(around, bad):
    factors = [math.inf if index in bad else 1.0 for index in range(4)]
    weights = [
        trained_on(lambda params: around(torch.optim.Adam(params, 0.1)), scaler, factors)[0]
        for scaler in (LossScaler(16.0), torch.amp.GradScaler("cpu", 16.0))
    ]
    assert torch.equal(*weights)


class Replaces(torch.optim.Optimizer):
    """Puts a new dict in the place of each parameter's state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.mul_(0.5)
                    continue
                before = self.state[parameter]
                total = before.get("total", torch.zeros_like(parameter)) + parameter.grad
                self.state[parameter] = {"total": total, "steps": before.get("steps", 0) + 1, "kept": [total.clone()]}
                parameter.sub_(total, alpha=group["lr"])


@pytest.mark.usefixtures("way_to_skip")
def test_state_whose_dict_is_another_one_and_parameters_without_gradients():
    weight, unused = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = Replaces([weight, unused], 0.1), LossScaler(4.0)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    settle(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.3]))
    assert unused.item() == 0.25
    assert optimizer.state[weight]["total"].item() == 2.0
    assert optimizer.state[weight]["steps"] == 2
    assert optimizer.state[weight]["kept"][0].item() == 2.0

"""half_function, float_function, promote_function and register_*: casts of the arguments of a user's own functions."""

import threading
import types

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError
from fxamp.runtime import apex as amp
from fxamp.runtime.apex_casts import casts_into, registry

CAPTURES = ["symbolic", "dynamo"]
seen: list[torch.dtype] = []


@pytest.fixture(autouse=True)
def fresh():
    yield
    amp._amp_state.session = amp.casting.low = None
    for paths in registry.values():
        paths.clear()


@amp.float_function
def energy(x):
    return x.add(x).add(x).mul(100.0)  # 300 * x: beyond float16 from x = 219


@amp.half_function
def rounded(x):
    return x.mul(1.0)


@amp.half_function
def peak(x):
    return x.exp()  # beyond float16 from x = 11.1


@amp.promote_function
def total(x, others):
    return sum(others, x)


class Net(nn.Module):
    def __init__(self, function, width=8):
        super().__init__()
        self.a = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.a.weight)
        self.function = [function]

    def forward(self, x):
        return self.function[0](self.a(x))


def start(net, opt_level="O1", **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if opt_level == "O1":
        options = {"dtype": torch.float16, **options}
    else:
        options = {"cast_model_type": torch.float16, **options}
    return amp.initialize(net, optimizer, opt_level=opt_level, verbosity=0, **options)[0]


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_float_function_of_the_users_does_not_overflow(capture):
    model = start(Net(energy), capture=capture)
    x = torch.full((2, 8), 300.0, requires_grad=True)
    assert torch.equal(model(x), torch.full((2, 8), 90000.0))
    assert {row.dtype for row in fxamp.report(model).rows if row.op in ("add", "mul")} == {"float32"}


@pytest.mark.parametrize("capture", CAPTURES)
def test_in_a_converted_model_the_casts_are_made_whatever_initialize_did(capture):
    x = torch.full((2, 8), 300.0, requires_grad=True)
    model = fxamp.convert(Net(energy), torch.float16, capture=capture)
    assert model(x)[0, 0] == 90000.0 and amp.casting.low is None
    first = start(Net(energy), capture=capture)
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert first(x)[0, 0] == 90000.0 and energy(torch.ones(1).half()).dtype == torch.float16
    example = fxamp.convert(Net(energy), torch.float16, (x,), capture=capture)
    assert {row.dtype for row in fxamp.report(example).rows if row.op in ("add", "mul")} == {"float32"}
    assert fxamp.what_if(example, infer=["exp"]).low_precision_nodes == fxamp.report(example).low_precision_nodes
    model = fxamp.convert(Net(rounded), torch.float16, (x,), capture=capture)
    assert model(x.detach() + 2**-4)[0, 0] == 300.0


def test_a_float_function_holds_at_o2_and_aggressively():
    x = torch.full((2, 8), 300.0)
    assert start(Net(energy), "O2")(x)[0, 0] == 90000.0
    model = start(nn.Sequential(Net(energy), nn.Linear(8, 8)), level="aggressive", example_inputs=(x,))
    assert {row.dtype for row in fxamp.report(model).rows if row.op in ("add", "mul")} == {"float32"}


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_half_function_rounds_its_arguments_and_leaves_the_lists_their_say(capture):
    x = torch.full((2, 8), 20.0)
    assert torch.equal(start(Net(peak), capture=capture)(x), x.exp())

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 1.0))

        def forward(self, x):
            return rounded(x * self.scale)

    x = torch.full((2, 8), 1.0 + 2**-12)
    assert torch.equal(start(Plain(), capture=capture)(x), torch.ones(2, 8))


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append(x.dtype)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_half_functions_get_low_tensors():
    seen.clear()
    model = start(Net(amp.half_function(Note.apply)))
    model(torch.ones(2, 8)).sum().backward()
    assert seen[-1] == torch.float16
    model = start(Net(amp.float_function(Note.apply)))
    model(torch.ones(2, 8)).sum().backward()
    assert seen[-1] == torch.float32


def test_outside_of_models_casts_are_made_only_while_amp_is_on():
    low, high, whole = torch.ones(3).half(), torch.ones(3), torch.arange(3)
    assert energy(low).dtype == torch.float16
    start(Net(energy))
    assert energy(low).dtype == torch.float32 and rounded(high).dtype == torch.float16
    assert total(low, [high, low]).dtype == torch.float32 and total(low, [low]).dtype == torch.float16
    assert rounded(whole).dtype == torch.float32 and rounded(high.double()).dtype == torch.float64
    with amp.disable_casts():
        assert energy(low).dtype == torch.float16 and rounded(high).dtype == torch.float32
    assert rounded(high).dtype == torch.float16
    amp.initialize(nn.Linear(1, 1), enabled=False)
    assert rounded(high).dtype == torch.float32
    start(Net(energy))
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert energy(low).dtype == torch.float16


def test_arguments_in_containers_and_by_name_are_cast():
    start(Net(energy))
    noted = amp.float_function(lambda *args, **kwargs: (args, kwargs))
    low = torch.ones(2).half()
    args, kwargs = noted([low, (low, 5)], None, more=low)
    assert args[0][0].dtype == args[0][1][0].dtype == kwargs["more"].dtype == torch.float32
    assert args[0][1][1] == 5 and args[1] is None


def test_functions_of_modules_and_classes_are_registered_by_name():
    theirs = types.ModuleType("theirs")
    theirs.cube = lambda x: x.mul(100.0).mul(3.0)

    class Ops:
        @staticmethod
        def cube(x):
            return x.mul(100.0).mul(3.0)

        @classmethod
        def of_class(cls, x):
            return cls.cube(x)

        def of_object(self, x):
            return self.cube(x)

    amp.register_float_function(theirs, "cube")
    for name in ("cube", "of_class", "of_object"):
        amp.register_float_function(Ops, name)
    amp.register_float_function(theirs, "cube")
    for function in (theirs.cube, Ops.cube, Ops.of_class, Ops().of_object):
        model = start(Net(lambda x, function=function: function(x)))
        assert model(torch.full((2, 8), 300.0))[0, 0] == 90000.0
    for owner, name, culprit in (
        (theirs, "cubic", "No function named cubic in module theirs"),
        (theirs, 5, "theirs is registered by its name.*5"),
        (theirs, "__name__", "theirs.__name__ is a str"),
    ):
        with pytest.raises(OptionError, match=culprit):
            amp.register_half_function(owner, name)
    with pytest.raises(OptionError, match="int is no function"):
        amp.half_function(5)


def test_classes_are_registered_by_their_forward_or_apply_or_as_a_whole():
    class Own(Note):
        pass

    class Layer(nn.Module):
        def forward(self, x):
            return x.mul(100.0).mul(3.0)

    amp.register_half_function(Own, "apply")
    amp.register_float_function(Layer, "forward")
    seen.clear()
    start(Net(Own.apply))(torch.ones(2, 8))
    assert seen[-1] == torch.float16 and "apply" not in vars(Note)
    model = start(nn.Sequential(Net(torch.relu), Layer()))
    assert model(torch.full((2, 8), 300.0))[0, 0] == 90000.0
    theirs = types.ModuleType("theirs")
    theirs.Note = Note
    amp.register_half_function(theirs, "Note")
    assert amp.float_function(Layer) is Layer and theirs.Note is Note
    assert registry["deny"] == [f"{__name__}.{Layer.__qualname__}"]
    start(Net(Note.apply))(torch.ones(2, 8))
    assert seen[-1] == torch.float16


def test_functions_of_torch_follow_the_lists():
    amp.register_half_function(torch, "exp")
    model = start(Net(torch.exp))
    assert {row.dtype for row in fxamp.report(model).rows if row.op == "exp"} == {"float16"}


def test_disable_casts_runs_the_model_as_written():
    net = Net(torch.sin)
    x = torch.randn(4, 8)
    nn.init.normal_(net.a.weight)
    plain = net(x)
    model = start(net)
    low = model(x)
    assert not torch.equal(low, plain)
    with amp.disable_casts():
        assert torch.equal(model(x), plain)
    assert torch.equal(model(x), low)
    amp._amp_state.session = None
    with amp.disable_casts():
        assert torch.equal(model(x), low)


def test_a_model_that_is_refused_where_casts_are_disabled_leaves_amp_on_behind():
    start(Net(torch.sin))

    def refuse(model, **options):
        raise OptionError("refused")

    with amp.disable_casts(), pytest.raises(OptionError, match="refused"):
        start(Net(torch.sin), convert=refuse)
    assert dtype_of_rounded() == torch.float16


def in_another_thread(call):
    """What a call gives in a thread of its own, begun and ended now."""
    given = []
    thread = threading.Thread(target=lambda: given.append(call()))
    thread.start()
    thread.join()
    return given[0]


def dtype_of_rounded():
    return rounded(torch.ones(2)).dtype


def test_a_capture_in_one_thread_makes_no_other_one_cast():
    with casts_into(torch.float16):
        assert dtype_of_rounded() == torch.float16
        assert in_another_thread(dtype_of_rounded) == torch.float32
    assert dtype_of_rounded() == torch.float32


def test_captures_of_two_threads_cast_each_to_its_own():
    both_inside = threading.Barrier(2, timeout=30)
    found = {}

    def capture(low):
        with casts_into(low):
            both_inside.wait()
            found[low] = dtype_of_rounded()
            both_inside.wait()
        found[low, "after"] = dtype_of_rounded()

    threads = [threading.Thread(target=capture, args=(low,)) for low in (torch.float16, torch.bfloat16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[torch.float16] == torch.float16 and found[torch.bfloat16] == torch.bfloat16
    assert found[torch.float16, "after"] == found[torch.bfloat16, "after"] == torch.float32


def test_amp_is_on_and_disabled_in_every_thread():
    start(Net(rounded))
    assert in_another_thread(dtype_of_rounded) == torch.float16
    with amp.disable_casts():
        assert dtype_of_rounded() == torch.float32
        assert in_another_thread(dtype_of_rounded) == torch.float32
    assert dtype_of_rounded() == in_another_thread(dtype_of_rounded) == torch.float16


def test_a_class_that_is_no_op_is_refused_at_once():
    """Taken, every later initialize() of the process would fail."""
    with pytest.raises(OptionError, match=r"SGD is a class, and neither a torch.nn.Module nor.*Give the function"):
        amp.half_function(torch.optim.SGD)

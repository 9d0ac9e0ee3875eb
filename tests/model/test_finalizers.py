"""The end of the original, whose state the converted model has: `model = fxamp.convert(model)` lets go of it."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import fxamp
from fxamp.ir import ORIGINAL
from fxamp.model.views import plain_view

LOW = torch.bfloat16
XS = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
ended = []


class Unet(nn.Module):
    """As fastai's DynamicUnet: hooks keep the encoder's results, and are taken off at the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.middle, self.decoder = nn.Linear(8, 8), nn.Linear(16, 4)
        self.kept = kept = {}
        self.handle = self.encoder.register_forward_hook(lambda module, args, result: kept.__setitem__("a", result))

    def forward(self, x):
        y = self.encoder(x)
        return self.decoder(torch.cat([self.middle(y), self.kept["a"]], 1))

    def __del__(self):
        self.handle.remove()


class Closing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x).relu()

    def __del__(self):
        ended.append(type(self).__qualname__)


class Around(nn.Module):
    """Runs as it is written: what it asks depends on a layer's result."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Closing(), nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return self.last(y + 1 if y.sum() > 0 else y)


LEVELS = [{"opt_level": "O1"}, {"opt_level": "O2"}, {"capture": "dynamo"}, {"example_inputs": (XS[0],)}]


@pytest.fixture(autouse=True)
def nothing_has_ended():
    gc.collect()
    ended.clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("options", LEVELS)
def test_hooks_stay_that_the_end_of_the_original_takes_off(options, is_kept):
    model, reference = Unet(), Unet()
    with torch.no_grad():
        model(XS[2])
    converted = fxamp.convert(model, dtype=LOW, **options)
    if not is_kept:
        del model
    for x in XS:
        gc.collect()
        torch.testing.assert_close(converted(x), reference(x), rtol=0.02, atol=0.02)
        converted(x).sum().backward()
        converted.state_dict()
        assert len(converted.encoder._forward_hooks) == 1


@pytest.mark.parametrize("options", [*LEVELS, {"boundaries": ["fc"]}])
def test_no_object_of_fxamps_own_ends_as_the_users(options):
    model = fxamp.convert(Closing(), dtype=LOW, **options)
    for x in XS:
        model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    model.train().eval().to("cpu")
    fxamp.report(model)
    fxamp.compare(Closing(), model, (XS[0],))
    copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
    gc.collect()
    assert ended == ["Closing"]  # compare()'s
    assert all(torch.equal(twin(XS[0]), model(XS[0])) for twin in copies)
    assert {type(twin).__qualname__ for twin in copies} == {"Closing"}


@pytest.mark.parametrize("is_boundary", [False, True])
def test_nor_one_of_a_part(is_boundary):
    around = Around()
    model = fxamp.convert(around, dtype=LOW, **({"boundaries": ["inner"]} if is_boundary else {}))
    del around
    for x in XS:
        model(x).sum().backward()
    gc.collect()
    assert ended == []
    del model
    torch._dynamo.reset()
    gc.collect()
    assert ended == ["Closing"]


def test_nor_one_that_shows_a_forward_that_runs_as_written():
    class Ending(Around):
        def __del__(self):
            ended.append("Ending")

    model = fxamp.convert(Ending(), dtype=LOW, opt_level="O2")
    for x in XS:
        model(x).sum().backward()
    assert ended == []
    del model
    torch._dynamo.reset()
    gc.collect()
    assert sorted(ended) == ["Closing", "Ending"]


def test_nor_one_that_is_converted_again():
    model = fxamp.convert(Closing(), dtype=LOW)
    for level in ("strict", "balanced"):
        model = fxamp.convert(model, dtype=LOW, level=level)
        gc.collect()
        model(XS[0]).sum().backward()
        assert ended == []
    del model
    gc.collect()
    assert ended == ["Closing"]


class Middle(nn.Module):
    """Holds a part that is converted by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.scale = nn.Linear(8, 8), 2.0
        self.fc.__dict__["parent"] = weakref.ref(self)

    def forward(self, x):
        return self.fc(x) * self.fc.parent().scale

    def __del__(self):
        ended.append(type(self).__qualname__)


def test_nor_one_between_a_boundary_and_the_model():
    model = fxamp.convert(nn.Sequential(Middle(), nn.ReLU()), dtype=LOW, boundaries=["0.fc"])
    for x in XS:
        gc.collect()
        model(x).sum().backward()
    assert ended == []
    del model
    gc.collect()
    assert ended == ["Middle"]


def test_nor_one_that_stays_whole():
    """For its hooks: captures run it on fake tensors, on copies."""
    part = Closing()
    part.register_forward_hook(lambda module, args, result: result * 2)
    model = fxamp.convert(nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8), part), dtype=LOW, capture="symbolic")
    for x in XS:
        model(x).sum().backward()
    gc.collect()
    assert ended == []


def test_views_and_copies_do_not_hold_the_original():
    assert ORIGINAL not in vars(plain_view(fxamp.convert(Closing(), dtype=LOW)))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_the_end_of_both_is_the_end(opt_level):
    model = fxamp.convert(Closing(), dtype=LOW, opt_level=opt_level)
    model(XS[0]).sum().backward()
    gc.collect()
    assert ended == []
    del model
    gc.collect()
    assert ended == ["Closing"]


class Child(nn.Module):
    """Knows its parent without a cycle of references."""

    def __init__(self, parent):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.__dict__["parent"] = weakref.ref(parent)

    def forward(self, x):
        return self.fc(x) * self.parent().scale


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = 2.0
        self.child = Child(self)

    def forward(self, x):
        return self.child(x) + 1


@pytest.mark.parametrize("options", [*LEVELS, {"boundaries": ["child"]}])
def test_a_weak_reference_to_the_original_stays_alive(options):
    converted, reference = fxamp.convert(Parent(), dtype=LOW, **options), Parent()
    for x in XS:
        gc.collect()
        torch.testing.assert_close(converted(x), reference(x), rtol=0.02, atol=0.02)


def test_what_a_finalizer_of_the_original_closes_stays_open():
    store = {"scale": 3.0}
    model = Closing()
    weakref.finalize(model, store.clear)
    model.forward_store = store
    converted = fxamp.convert(model, dtype=LOW)
    del model
    gc.collect()
    assert store
    del converted
    gc.collect()
    assert not store


def test_an_original_that_nobody_would_miss_is_not_kept():
    """What is replaced later would be held by it."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x)

    assert ORIGINAL not in vars(fxamp.convert(Plain(), dtype=LOW))
    assert ORIGINAL in vars(fxamp.convert(Closing(), dtype=LOW))

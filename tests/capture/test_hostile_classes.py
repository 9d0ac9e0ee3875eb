"""State held in classes whose own methods raise: it is read past them, and never raises into the user's call."""

import collections

import pytest
import torch
from torch import nn

import fxamp

bf16 = torch.bfloat16


def _forbidden(*_: object) -> object:
    raise NotImplementedError("not to be asked")


class NoLength(tuple):
    """As e3nn's Irrep."""

    __len__ = _forbidden


class NoTuple(tuple):
    __len__ = __iter__ = __eq__ = __repr__ = __bool__ = _forbidden
    __hash__ = tuple.__hash__


class NoList(list):
    __len__ = __iter__ = __eq__ = __repr__ = __bool__ = copy = clear = extend = _forbidden


class NoSet(set):
    __len__ = __iter__ = __eq__ = __repr__ = __bool__ = copy = clear = update = _forbidden


class NoDict(dict):
    __len__ = __iter__ = __eq__ = __repr__ = __bool__ = copy = keys = values = items = _forbidden


class NoDeque(collections.deque):
    __len__ = __iter__ = __eq__ = __repr__ = __bool__ = copy = clear = extend = _forbidden


class NoFloat(float):
    __eq__ = __hash__ = __repr__ = __bool__ = _forbidden


class NoText(str):
    __eq__ = __len__ = __iter__ = __repr__ = __bool__ = _forbidden
    __hash__ = str.__hash__


class NoObject:
    """As dictionaries that answer to attributes: a name that is not there is a KeyError."""

    def __init__(self) -> None:
        self.__dict__["factor"] = 2.0

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)

    __len__ = __iter__ = __eq__ = __hash__ = __repr__ = __bool__ = _forbidden


class NoPart(list):
    """Elements of which none can be compared, hashed or shown."""

    def __init__(self) -> None:
        super().__init__([NoObject(), NoTuple((1.0,))])


class Holds(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.held
        return self.fc(x) if found is not None else x


HOSTILE = [
    NoLength((1, -1)),
    NoTuple((1, 2)),
    NoList([1, 2]),
    NoSet({1, 2}),
    NoDict(a=1),
    NoDeque([1]),
    NoFloat(2.0),
    NoText("x"),
    NoObject(),
    NoPart(),
    {"inner": NoObject()},
    [NoTuple((1,))],
    frozenset({NoTuple((1,))}),
]


@pytest.mark.parametrize("held", HOSTILE, ids=lambda held: type(held).__name__)
def test_state_that_forbids_to_be_asked_is_read(held: object) -> None:
    model, x = Holds(held), torch.randn(2, 8)
    converted = fxamp.convert(model, dtype=bf16, capture="symbolic")
    first = converted(x)
    assert torch.equal(converted(x), first)
    assert len(fxamp.report(converted).captures) == 1
    assert fxamp.report(converted).low_precision_nodes > 0


class Scales(nn.Module):
    """Reads an element of a tuple that forbids len()."""

    def __init__(self) -> None:
        super().__init__()
        self.irrep: tuple[float, ...] = NoLength((2.0, -1.0))
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.irrep[0]


@pytest.mark.parametrize("capture", ["auto", "symbolic"])
def test_an_element_of_a_tuple_without_a_length_is_followed(capture: str) -> None:
    model, x = Scales(), torch.randn(2, 8)
    converted = fxamp.convert(model, dtype=bf16, capture=capture)
    first = converted(x)
    assert torch.allclose(first.float(), model(x), atol=0.1)
    converted.irrep = NoLength((4.0, -1.0))
    assert torch.equal(converted(x), first * 2)


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = NoList()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape)
        return self.fc(x)


def test_what_a_trace_writes_into_such_a_list_is_taken_back() -> None:
    model = Appends()
    with pytest.raises(fxamp.errors.CaptureError, match=r"writes into self\.seen \(NoList\)"):
        fxamp.convert(model, dtype=bf16, capture="symbolic")(torch.randn(2, 8))
    assert list.__len__(model.seen) == 0

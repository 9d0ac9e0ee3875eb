"""A model that was moved, cast or changed since it was captured is noticed at its next call."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import Engine, engine_of
from fxamp.model.structure import Structure

X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def captures(monkeypatch):
    """Counts captures."""
    made = []
    build = Engine._build
    monkeypatch.setattr(Engine, "_build", lambda *given: (made.append(1), build(*given))[1])
    return made


MOVES = {
    "the converted model": lambda model, converted: converted.to("meta"),
    "the plain model": lambda model, converted: model.to("meta"),
    "a parameter": lambda model, converted: setattr(model.head, "bias", nn.Parameter(model.head.bias.to("meta"))),
}


@pytest.mark.parametrize("move", ["the converted model", "a parameter"])
def test_a_device_of_another_type_is_another_structure(move):
    model = Net()
    structure = Structure(model)
    assert structure.holds()
    MOVES[move](model, model)
    assert not structure.holds() and Structure(model).fingerprint != structure.fingerprint
    assert Structure(copy.deepcopy(model)).fingerprint == Structure(model).fingerprint


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_model_that_was_moved_is_captured_for_its_new_device(opt_level, captures):
    model = Net()
    converted = fxamp.convert(model, dtype="float16", opt_level=opt_level, example_inputs=(X,))
    on_cpu = engine_of(converted).all_variants()
    converted(X)
    captures.clear()
    converted.to("meta")
    assert converted(X.to("meta")).device.type == "meta"
    converted(X.to("meta"))
    assert len(captures) == 1
    assert not {id(variant) for variant in on_cpu} & {id(variant) for variant in engine_of(converted).all_variants()}


def test_what_the_old_device_had_decided_is_decided_again():
    class Pooled(nn.Module):  # the CPU has no low kernel for this pool
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv3d(3, 8, 1), nn.Conv3d(8, 8, 1)

        def forward(self, x):
            return self.second(nn.functional.avg_pool3d(self.first(x), 2))

    x = torch.randn(1, 3, 4, 4, 4)
    with torch.device("meta"):
        model = Pooled()
    converted = fxamp.convert(model, dtype="bfloat16", example_inputs=(x.to("meta"),))
    converted.to_empty(device="cpu")
    for weight in converted.parameters():
        nn.init.ones_(weight)
    converted(x)
    directly = fxamp.convert(Pooled(), dtype="bfloat16", example_inputs=(x,))
    moved, made = ([(row.op, row.precision) for row in fxamp.report(m).rows] for m in (converted, directly))
    assert moved == made


@pytest.mark.parametrize("move", ["the converted model", "the plain model"])
def test_equal_blocks_stay_one_where_they_are_moved_together(move, captures):
    model = Net()
    converted = fxamp.convert(model, dtype="bfloat16", boundaries="blocks", example_inputs=(X,))
    converted(X)
    assert len(captures) == 2
    captures.clear()
    MOVES[move](model, converted)
    for _ in range(2):
        assert converted(X.to("meta")).device.type == "meta"
    assert len(captures) == 2  # around the blocks, and one for them all
    engine = engine_of(converted)
    assert list(engine.blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    assert {id(block) for block in engine.blocks.values()} == {id(engine_of(block)) for block in converted.blocks}
    assert fxamp.report(converted).captures == ("symbolic", "symbolic")


def test_a_copy_that_was_moved_leaves_the_original_alone(captures):
    converted = fxamp.convert(Net(), dtype="bfloat16", boundaries="blocks", example_inputs=(X,))
    expected = converted(X)
    twin = copy.deepcopy(converted).to("meta")
    assert twin(X.to("meta")).device.type == "meta"
    captures.clear()
    assert torch.equal(converted(X), expected) and not captures
    inner = {id(block) for block in engine_of(converted).blocks.values()}
    assert inner.isdisjoint(id(block) for block in engine_of(twin).blocks.values())


def test_an_exchanged_block_is_no_longer_counted_among_the_blocks():
    converted = fxamp.convert(Net(), dtype="bfloat16", boundaries="blocks", example_inputs=(X,))
    converted(X)
    converted.blocks[1] = nn.Tanh()
    converted(X)
    assert list(engine_of(converted).blocks) == ["blocks.0", "blocks.2"]
    converted.freeze()


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_block_that_has_lost_its_parts_can_be_called_and_frozen(capture):
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    converted = fxamp.convert(model, torch.bfloat16, boundaries=["*.0"], capture=capture)
    converted(X)
    converted[0] = nn.Tanh()
    converted.freeze()
    converted[1] = nn.Sequential(nn.Tanh(), nn.Tanh())
    assert torch.allclose(converted(X), X.tanh().tanh().tanh())
    converted.freeze()
    assert torch.allclose(converted(X), X.tanh().tanh().tanh())


class Twice(nn.Module):
    """Three blocks, of which two are one."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList([parts[number] for number in order])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_block_that_stands_in_another_place_is_noticed(opt_level):
    model = Twice(0, 0, 1)
    converted = fxamp.convert(copy.deepcopy(model), torch.float16, (X,), opt_level)
    converted(X)
    for each in (model, converted):
        each.blocks[1] = each.blocks[2]
    assert torch.allclose(converted(X), model(X), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_hook_that_is_set_on_a_part_after_the_first_call_runs(capture, part):
    model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5, affine=False)).eval()
    converted = fxamp.convert(model, "bfloat16", capture=capture)
    without = converted(X)
    handle = converted[part].register_forward_hook(lambda module, given, result: result * 0)
    assert not converted(X).any()
    handle.remove()
    assert torch.equal(converted(X), without)


def test_a_model_that_changes_back_and_forth_is_captured_once_for_each_state(captures):
    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 2))])
            self.head = self.heads[0]

        def forward(self, x):
            return self.head(self.stem(x))

    torch.manual_seed(0)
    model = Tasks()
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=(X,))
    captures.clear()
    for call in range(8):
        for each in (converted, plain):
            each.head = each.heads[call % 2]
        with torch.no_grad():  # weights that change between are those that are read
            for each in (converted, plain):
                each.heads[call % 2].get_parameter("bias" if call % 2 == 0 else "0.bias").add_(1)
        torch.testing.assert_close(converted(X), plain(X), rtol=0.02, atol=0.05)
    assert len(captures) == 1, "the other head's; the first has a graph from the conversion"


def test_only_a_few_states_are_kept(captures):
    converted = fxamp.convert(Net(), torch.bfloat16, example_inputs=(X,))
    widths = [nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)]) for count in range(1, 8)]
    for block in [*widths, *widths]:
        converted.blocks[0] = block
        converted(X)
    assert len(captures) == 1 + 2 * len(widths)
    assert len(engine_of(converted).known) <= Engine.most_known


@pytest.mark.parametrize("capture", ["auto", "symbolic", "dynamo"])
@pytest.mark.parametrize("is_called_first", [True, False])
def test_a_parametrization_of_the_model_itself_is_refused_and_can_be_taken_back(capture, is_called_first):
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    converted = fxamp.convert(model, dtype=torch.bfloat16, capture=capture)
    if is_called_first:
        converted(x)
    nn.utils.parametrizations.weight_norm(converted)
    with pytest.raises(
        fxamp.OptionError, match=r"Linear was parametrized \(weight\) after it was converted.*remove_para"
    ):
        converted(x)
    nn.utils.parametrize.remove_parametrizations(converted, "weight")
    torch.testing.assert_close(converted(x), model(x), rtol=0.02, atol=0.02)
    parametrized = fxamp.convert(nn.utils.parametrizations.weight_norm(model), dtype=torch.bfloat16, capture=capture)
    torch.testing.assert_close(parametrized(x), model(x), rtol=0.02, atol=0.02)

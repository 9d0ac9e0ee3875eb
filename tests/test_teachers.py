"""Teachers, frozen copies that follow what is trained by an average of weights, stay in float32 at O2."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import fxamp
from fxamp.teachers import weights_of_teachers
from tests.choosing import Block, batch

BF16 = torch.bfloat16


class Momentum(nn.Module):
    """A student and its teacher, as in MoCo, BYOL and BLIP."""

    def __init__(self, decides):
        super().__init__()
        self.student, self.head = nn.Sequential(Block(), Block()), nn.Linear(16, 16)
        self.teacher, self.decides = copy.deepcopy(self.student).requires_grad_(False), decides

    @torch.no_grad()
    def follow(self):
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data = own.data * 0.998 + other.data * 0.002

    def forward(self, x):
        with torch.no_grad():
            if self.decides:
                self.follow()
            target = self.teacher(x)
        loss = (self.head(self.student(x)) - target).square().mean()
        return loss if not self.decides or loss.item() < 1e9 else loss * 0  # no graph holds a decision on data


def teacher_of(model):
    return {name: weight.double() for name, weight in model.state_dict().items() if name.startswith("teacher")}


@pytest.mark.parametrize("decides", [False, True], ids=["graph", "as written"])
def test_a_teacher_follows_its_student_as_in_float32(decides):
    torch.manual_seed(0)
    model = Momentum(decides)
    converted = fxamp.convert(copy.deepcopy(model), BF16, opt_level="O2")
    begin = teacher_of(model)
    plain = torch.optim.SGD(model.parameters(), 0.5)
    masters = fxamp.MasterWeightOptimizer(torch.optim.SGD(converted.parameters(), 0.5))
    for step in range(30):
        for each, optimizer in ((model, plain), (converted, masters)):
            each(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not decides:
                each.follow()
    followed, found = teacher_of(model), teacher_of(converted)
    moved = sum(float((followed[name] - begin[name]).square().sum()) for name in begin) ** 0.5
    apart = sum(float((followed[name] - found[name]).square().sum()) for name in begin) ** 0.5
    assert apart < 0.2 * moved
    assert converted.student[0].up.weight.dtype == BF16


def test_the_log_names_them(caplog):
    with caplog.at_level(logging.INFO, "fxamp"):
        fxamp.convert(Momentum(False), BF16, opt_level="O2")
    (said,) = [record.getMessage() for record in caplog.records if "frozen copies" in record.getMessage()]
    assert said.startswith("Momentum: 12 weights (teacher.0.down.bias, ...) are frozen copies of trained ones")


def test_a_copy_is_known_by_its_numbers_and_its_place():
    torch.manual_seed(0)
    model = Momentum(False)
    inside = [name for name, _ in model.named_parameters() if name.startswith("teacher")]
    assert weights_of_teachers(model) == inside
    with torch.no_grad():  # the student has gone on
        for weight in model.student.parameters():
            weight.add_(torch.randn_like(weight) * weight.std().nan_to_num())
    assert weights_of_teachers(model) == inside
    for module in model.teacher.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    assert weights_of_teachers(model) == []
    model = Momentum(False)
    model.teacher.requires_grad_(True)
    assert weights_of_teachers(model) == []


def test_small_matrices_are_copies_where_they_are_equal():
    torch.manual_seed(0)
    small = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4).requires_grad_(False)})
    small["other"].load_state_dict(small["one"].state_dict())
    assert weights_of_teachers(small) == ["other.weight", "other.bias"]
    small["other"].weight.add_(torch.randn(4, 4) / 10)
    assert weights_of_teachers(small) == []


def test_a_copy_beside_its_original_is_one():
    layer = nn.Linear(4, 4)
    layer.average = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    assert weights_of_teachers(layer) == ["average"]


def test_a_copy_at_the_root_does_not_make_all_that_is_frozen_one():
    torch.manual_seed(0)
    model = nn.Module()
    model.layer, model.other = nn.Linear(8, 8), Block().requires_grad_(False)
    model.weight = nn.Parameter(model.layer.weight.detach().clone(), requires_grad=False)
    assert weights_of_teachers(model) == ["weight"]


def test_one_bad_number_hides_no_teacher():
    torch.manual_seed(0)
    model = Momentum(False)
    model.extra = nn.Linear(16, 32)
    with torch.no_grad():
        model.extra.weight[0, 0], model.extra.weight[0, 1] = torch.inf, torch.nan
    assert len(weights_of_teachers(model)) == 12


def test_a_teacher_that_is_tied_to_an_earlier_name_is_whole():
    torch.manual_seed(0)
    model, inner = nn.Module(), Momentum(False)
    model.alias, model.inner = nn.Linear(16, 32, bias=False), inner
    model.alias.weight = inner.teacher[0].up.weight
    assert {"inner.teacher.0.up.weight", "inner.teacher.0.up.bias"} <= set(weights_of_teachers(model))


def test_what_is_frozen_for_another_reason_is_none():
    torch.manual_seed(0)
    adapted = nn.ModuleDict({"frozen": Block(), "trained": Block()})
    adapted["frozen"].requires_grad_(False)
    for block in adapted.values():
        nn.init.zeros_(block.down.weight)  # as adapters begin
    assert weights_of_teachers(adapted) == []
    for block in adapted.values():
        nn.init.uniform_(block.up.weight)  # alike in their means alone
    assert weights_of_teachers(adapted) == []
    low = fxamp.convert(nn.Sequential(*adapted.values()), BF16, opt_level="O2")
    assert low[0].up.weight.dtype == BF16


def test_what_holds_no_numbers_tells_nothing():
    with torch.device("meta"):
        assert weights_of_teachers(Momentum(False)) == []
    with FakeTensorMode():
        assert weights_of_teachers(Momentum(False)) == []
    sparse = nn.ParameterList(torch.eye(16).to_sparse() for _ in range(2))
    sparse[0].requires_grad_(False)
    assert weights_of_teachers(sparse) == []


def test_an_override_stores_a_copy_low():
    model = Momentum(False)
    low = fxamp.convert(model, BF16, opt_level="O2", overrides={"teacher.0": "allow"})
    assert low.teacher[0].up.weight.dtype == BF16
    assert low.teacher[1].up.weight.dtype == torch.float32

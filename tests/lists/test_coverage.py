"""Every op that torch enumerates stands on a list."""

import inspect
import operator

import pytest
import torch
import torch.nn.functional as F
from known_ops import autocast_registrations, op_infos, op_of

from fxamp.lists import OpLists
from fxamp.opnames import ALIASES, MODULES, canonical_name

# F's helpers for overriding and argument checks compute nothing.
NOT_OPS = {"handle_torch_function", "boolean_dispatch", "assert_int_or_pair"}


def unlisted(ops) -> list[str]:
    return sorted(set(ops) - set(OpLists.default()))


def test_op_database_is_listed():
    assert unlisted(op_of(info) for info in op_infos()) == []


def test_op_database_is_not_empty():
    assert len({op_of(info) for info in op_infos()}) > 550


@pytest.mark.parametrize("key", ["AutocastCUDA", "AutocastCPU"])
def test_autocast_is_listed(key):
    names = autocast_registrations(key)
    assert len(names) > 100
    assert unlisted(canonical_name(name.partition(".")[0]) for name in names) == []


def test_a_missing_op_is_named():
    assert unlisted(["linear", "no_such_op"]) == ["no_such_op"]


def test_functional_is_listed():
    functions = {name: getattr(F, name) for name in dir(F) if not name.startswith("_")}
    ops = {canonical_name(function) for name, function in functions.items() if inspect.isroutine(function)}
    assert unlisted(op for op in ops - NOT_OPS if "has_torch_function" not in op) == []


def test_operators_on_tensors_are_listed():
    names = "abs add and_ eq floordiv ge getitem gt iadd iand ifloordiv imatmul imod imul inv invert ior ipow"
    names += " isub itruediv ixor le lshift lt matmul mod mul ne neg or_ pos pow rshift setitem sub truediv xor"
    assert unlisted(canonical_name(getattr(operator, name)) for name in names.split()) == []


def test_aliases_and_modules_lead_to_listed_ops():
    assert unlisted(ALIASES.values()) == []
    assert unlisted(MODULES.values()) == []


class EveryKind(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.attention, self.rnn = torch.nn.MultiheadAttention(4, 2), torch.nn.GRU(4, 4)
        self.layer_norm, self.table = torch.nn.LayerNorm(4), torch.nn.Embedding(5, 4)

    def forward(self, image, tokens):
        image = F.max_pool2d(F.relu(self.norm(self.conv(image))), 2).flatten(2).permute(2, 0, 1)
        image = self.rnn(self.attention(image, image, image)[0])[0]
        return torch.cat([self.layer_norm(image.mean(0)), F.dropout(self.table(tokens), 0.1)]).softmax(-1)


def test_exported_graph_is_listed():
    example = (torch.randn(2, 3, 8, 8), torch.tensor([1, 2]))
    exported = torch.export.export(EveryKind().eval(), example)
    for program in (exported, exported.run_decompositions()):
        calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert len(calls) > 15
        assert unlisted(canonical_name(target) for target in calls) == []

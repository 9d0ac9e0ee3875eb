"""Configurations of omegaconf's: a graph holds for what they hold, and what their code does is not looked into.

Where omegaconf is not installed, classes stand for its own that keep what they hold as those do.
"""

import copy
import types
from typing import ClassVar

import pytest
import torch
from torch import nn

import fxamp
from fxamp.capture import objects
from fxamp.capture.configs import is_config
from fxamp.model.engine import engine_of

EXACT = {"overrides": {"*": "deny"}}
FACTOR = 2.0


class Node:
    """As omegaconf's: what it holds stands in its `__dict__`, and is read by way of its code."""

    def __init__(self, held, parent=None):
        self.__dict__["_parent"] = parent
        if isinstance(held, dict):
            self.__dict__["_content"] = {key: Node(value, self) for key, value in held.items()}
        elif isinstance(held, list):
            self.__dict__["_content"] = [Node(value, self) for value in held]
        else:
            self.__dict__["_val"] = held

    def _read(self):
        if "_content" in self.__dict__:
            return self
        value = self.__dict__["_val"]
        if isinstance(value, str) and value.startswith("${") and value.endswith(":}"):
            return self._resolvers[value[2:-2]]()
        if isinstance(value, str) and value.startswith("${"):
            root = self
            while root.__dict__["_parent"] is not None:
                root = root.__dict__["_parent"]
            return getattr(root, value[2:-1])
        return value

    def __getattr__(self, name):
        if name not in self.__dict__["_content"]:
            raise AttributeError(name)
        self.__dict__["_flags_cache"] = {}
        return self.__dict__["_content"][name]._read()

    def __getitem__(self, key):
        return self.__dict__["_content"][key]._read()

    def __setattr__(self, name, value):
        content = self.__dict__["_content"]
        if name in content and not isinstance(value, dict):
            content[name].__dict__["_val"] = value  # the node stays
        else:
            content[name] = Node(value, self)

    def __contains__(self, name):
        return name in self.__dict__["_content"]

    def __len__(self):
        return len(self.__dict__["_content"])

    def __deepcopy__(self, memo):
        made = object.__new__(Node)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    _resolvers: ClassVar[dict] = {}


def register(name, function):
    Node._resolvers[name] = (lambda resolver: lambda: resolver())(function)


def stand_in():
    """A Python module like omegaconf."""
    Node.__module__ = "omegaconf.stand_in"
    return types.SimpleNamespace(create=Node, register=register)


@pytest.fixture(params=["stand-in", "omegaconf"])
def create(request):
    if request.param == "stand-in":
        made = stand_in()
    else:
        whole = pytest.importorskip("omegaconf", reason="omegaconf is not installed").OmegaConf
        made = types.SimpleNamespace(
            create=whole.create,
            register=lambda name, function: whole.register_new_resolver(name, function, replace=True),
        )
    made.register("factor", lambda: FACTOR)

    def build():
        return made.create(
            {
                "deep": {"in": {"a": {"b": {"c": {"value": 3.0}}}}},
                "widths": [1.0, 2.0],
                "count": 0,
                "gain": 4.0,
                "part": {"gain": "${gain}"},
                "factor": "${factor:}",
            }
        )

    return build


class Configured(nn.Module):
    def __init__(self, config, body):
        super().__init__()
        self.config, self.body = config, body
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(self.config, self.fc(x))


def deep(config, x):
    return x * getattr(config.deep, "in").a.b.c.value


def listed(config, x):
    return x * config.widths[0] * config.widths[1]


def named(config, x):
    return x * 2 if "flag" in config else x


def from_elsewhere(config, x):
    return x * config.part.gain


def resolved(config, x):
    return x * config.factor


def set_deep(config):
    getattr(config.deep, "in").a.b.c.value = 9.0


def set_middle(config):
    getattr(config.deep, "in").a = {"b": {"c": {"value": 11.0}}}


def set_item(config):
    config.widths = [1.0, 5.0]


def set_flag(config):
    config.flag = True


def set_gain(config):
    config.gain = 8.0


def set_global(config):
    global FACTOR
    FACTOR += 1.0


def pair(create, body, choose=lambda config: config):
    """A model and its converted copy, each with a configuration of its own."""
    configs = create(), create()
    torch.manual_seed(0)
    plain = Configured(choose(configs[0]), body)
    other = Configured(choose(configs[1]), body)
    other.load_state_dict(plain.state_dict())
    return configs, plain, other


def check(plain, converted, x, times=2):
    for _ in range(times):
        torch.testing.assert_close(converted(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("body", "change"),
    [
        (deep, set_deep),
        (deep, set_middle),
        (listed, set_item),
        (named, set_flag),
        (from_elsewhere, set_gain),
        (resolved, set_global),
    ],
)
@pytest.mark.parametrize("has_example", [False, True])
def test_a_change_is_another_graph(create, body, change, has_example):
    configs, plain, other = pair(create, body)
    x = torch.randn(2, 4)
    converted = fxamp.convert(other, torch.bfloat16, example_inputs=(x,) if has_example else None, **EXACT)
    check(plain, converted, x)
    assert len(engine_of(converted).all_variants()) == 1
    for config in configs if change is not set_global else configs[:1]:
        change(config)
    check(plain, converted, x)
    check(copy.deepcopy(plain), copy.deepcopy(converted), x)
    assert "(symbolic)" in str(fxamp.report(converted))


def test_a_part_of_a_configuration_takes_values_from_the_whole(create):
    def body(config, x):
        return x * config.gain

    configs, plain, other = pair(create, body, choose=lambda config: config.part)
    x = torch.randn(2, 4)
    converted = fxamp.convert(other, torch.bfloat16, **EXACT)
    check(plain, converted, x)
    for config in configs:
        config.gain = 7.0
    check(plain, converted, x)


def counted(config, x):
    config.count += 1
    return x * config.count


def counted_deep(config, x):
    getattr(config.deep, "in").a.b.c.value += 1
    return deep(config, x)


def made_once(config, x):
    if "made" in config:
        return x * 3
    config.made = True
    return x


@pytest.mark.parametrize("body", [counted, counted_deep, made_once])
@pytest.mark.parametrize("has_example", [False, True])
def test_what_forward_sets_is_set_at_each_call(create, body, has_example):
    _, plain, other = pair(create, body)
    x = torch.randn(2, 4)
    converted = fxamp.convert(other, torch.bfloat16, example_inputs=(x,) if has_example else None, **EXACT)
    check(plain, converted, x, times=3)


@pytest.mark.parametrize("body", [deep, from_elsewhere, resolved])
def test_its_code_is_not_looked_into(create, body):
    """Else a graph held for thousands of places in omegaconf's parser, and asked for them at each call."""
    _, _, other = pair(create, body)
    converted = fxamp.convert(other, torch.bfloat16)
    converted(torch.randn(2, 4))
    (variant,) = engine_of(converted).all_variants()
    assert len(variant.captured.state) < 40, [cell.title for cell in variant.captured.state]


def test_nodes_are_looked_at_a_few_times(create, monkeypatch):
    """Each interpolated value leads to the whole configuration; a node is met again where it is less deep, alone."""
    asked, parts = [], objects.parts_of_config
    monkeypatch.setattr(objects, "parts_of_config", lambda config: asked.append(config) or parts(config))
    config = create()
    for number in range(50):
        setattr(config, f"gain{number}", "${gain}")
    found = sum(map(is_config, objects.walk(config, into_libraries=True)))
    assert found > 60 and len(asked) <= 4 * found


def test_flags_and_resolvers_are_watched():
    whole = pytest.importorskip("omegaconf", reason="omegaconf is not installed").OmegaConf

    class Number:
        value = 2.0

        def get(self):
            return self.value

    number = Number()
    whole.register_new_resolver("of-a-method", number.get, replace=True)

    def locks(config, x):
        if whole.is_readonly(config):
            return x * 2
        whole.set_readonly(config, True)
        return x

    def build():
        return whole.create({"gain": "${ of-a-method:}", "part": {"gain": "${gain}"}})

    x = torch.randn(2, 4)
    for body in (locks, lambda config, x: x * 2 if whole.is_struct(config) else x, lambda config, x: x * config.gain):
        configs, plain, other = pair(build, body)
        converted = fxamp.convert(other, torch.bfloat16, **EXACT)
        check(plain, converted, x)
        for config in configs:
            whole.set_struct(config, True)
        check(plain, converted, x)
        number.value += 1
        check(plain, converted, x)
        whole.register_new_resolver("of-a-method", lambda: 11.0, replace=True)
        check(plain, converted, x)
        whole.register_new_resolver("of-a-method", number.get, replace=True)
    configs, plain, other = pair(build, lambda config, x: x * config.gain, choose=lambda config: config.part)
    converted = fxamp.convert(other, torch.bfloat16, **EXACT)
    check(plain, converted, x)
    for model in (plain, other):
        model.config._set_parent(whole.create({"gain": 9.0}))
    converted.config._set_parent(plain.config._get_parent())
    check(plain, converted, x)

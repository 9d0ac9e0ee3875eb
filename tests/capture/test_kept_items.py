"""Items of lists and dictionaries that forward sets: each program evolves as in eager, converted or not."""

import collections
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
EXACT = {"overrides": {"*": "deny"}}


class Skip(nn.Module):
    """Puts what a head of its own gives into the list of the whole net, as MONAI's DynUNet does."""

    def __init__(self, place, heads):
        super().__init__()
        self.place, self.heads = place, heads
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.fc(x))
        self.heads[self.place] = self.head(x)
        return x


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.heads = [torch.rand(1)] * 2
        self.skips = nn.ModuleList(Skip(place, self.heads) for place in range(2))
        self.losses, self.empty = [], [None, None]
        self.seen, self.ordered = {"first": None}, collections.OrderedDict(last=torch.zeros(3))
        self.by_kind = collections.defaultdict(list)
        self.nested = {"inner": {}}
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(self, x)


def deep_supervision(net, x):
    for skip in net.skips:
        x = skip(x)
    return torch.stack([net.fc(x), *(F.relu(head) for head in net.heads)])


def appended(net, x):
    y = net.fc(x)
    net.losses.append(y.square().mean())
    net.losses.append((y, x.mean()))
    return y


def cleared_first(net, x):
    net.losses.clear()
    net.losses.append(net.fc(x))
    return net.losses[-1] * 2


def by_name(net, x):
    net.seen["first"] = net.fc(x)
    net.seen["second"] = {"mean": net.seen["first"].mean(), "pair": (x, x + 1)}
    net.ordered["last"] = torch.sigmoid(net.seen["first"])
    return net.ordered["last"] + 1


def made_once(net, x):
    """A cache: the second call reads what the first has kept."""
    if net.empty[0] is None:
        net.empty[0] = torch.arange(8.0) / 8
    return net.fc(x) + net.empty[0]


def by_length(net, x):
    if len(x) not in net.seen:
        net.seen[len(x)] = torch.arange(float(len(x)))[:, None]
    return net.fc(x) + net.seen[len(x)]


def by_training(net, x):
    if net.training:
        net.seen["first"] = net.fc(x).mean()
    return net.fc(x)


def an_average(net, x):
    """Reads what the last call has kept."""
    y = net.fc(x)
    net.ordered["last"] = 0.9 * net.ordered["last"].mean() + 0.1 * y.detach().mean()
    return y + net.ordered["last"]


def by_the_last_shape(net, x):
    y = net.fc(x)
    if net.heads[0].shape != y.shape:
        y = y * 2
    net.heads[0] = y.detach()
    return y


def written_afterwards(net, x):
    y = net.fc(x) * 1
    net.heads[1] = y
    y += 1
    return y * 2


def in_another_container(net, x):
    net.nested["inner"]["value"] = net.fc(x)
    net.by_kind["a"].append(x)
    return net.nested["inner"]["value"] + 1


def taken_out(net, x):
    net.ordered.pop("last")
    net.ordered["last"] = net.fc(x)
    net.ordered["more"] = net.fc(x)
    net.ordered.move_to_end("last")
    return net.ordered["last"]


def replaced_too(net, x):
    net.heads[0] = net.fc(x)
    old, net.heads = net.heads, [x, x]
    return old[0] + 1


ONE_GRAPH = [deep_supervision, written_afterwards]
BODIES = [
    *ONE_GRAPH, appended, cleared_first, by_name, made_once, by_length, by_training, an_average, by_the_last_shape,
    in_another_container, taken_out, replaced_too,
]  # fmt: skip
SHAPES = [(4, 8), (4, 8), (6, 8), (4, 8), (6, 8), (6, 8), (6, 8), (4, 8)]


def pair(body):
    torch.manual_seed(0)
    plain = Net(body)
    return plain, copy.deepcopy(plain)


def inputs(step):
    return torch.randn(SHAPES[step % len(SHAPES)], generator=torch.Generator().manual_seed(step))


def kept(net):
    names = ("heads", "losses", "empty", "seen", "ordered", "by_kind", "nested")
    held = {name: getattr(net, name) for name in names}
    return held | {f"skips.{place}": skip.heads for place, skip in enumerate(net.skips)}


def same(one, other, **close):
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one.to(other.dtype), other, **close)  # low where forward runs as it is written
        assert one.requires_grad == other.requires_grad
    elif isinstance(one, (tuple, list, dict)):
        assert type(one) is type(other)
        assert len(one) == len(other)
        if isinstance(one, dict):
            assert list(one) == list(other)
            one, other = list(one.values()), list(other.values())
        for each, its in zip(one, other, strict=True):
            same(each, its, **close)
    else:
        assert one == other


def test_the_comparison_sees_differences():
    plain, model = pair(by_name)
    model(inputs(0))
    with pytest.raises(AssertionError):
        same(kept(model), kept(plain))
    plain(inputs(0))
    same(kept(model), kept(plain))
    model.seen["second"]["pair"][1].add_(1)
    with pytest.raises(AssertionError):
        same(kept(model), kept(plain))


@pytest.mark.parametrize(("opt_level", "options"), [("O1", EXACT), ("O1", {}), ("O2", {})], ids=["exact", "O1", "O2"])
@pytest.mark.parametrize(("body", "clears"), [*((body, True) for body in BODIES), (appended, False)])
def test_items_are_set_as_in_eager(body, clears, opt_level, options, fresh_dynamo):
    plain, model = pair(body)
    example = {"example_inputs": (inputs(0),)} if opt_level == "O2" else {}
    converted = fxamp.convert(model, LOW, opt_level=opt_level, **options, **example)
    same(kept(converted), kept(plain))
    close = {"rtol": 1e-5, "atol": 1e-6} if options and opt_level == "O1" else {"rtol": 0.05, "atol": 0.1}
    for step in range(len(SHAPES)):
        for net in (converted, plain):
            net.train(step % 3 != 2)
            if clears:
                net.losses.clear()
        found, expected = converted(inputs(step)), plain(inputs(step))
        same(found, expected, **close)
        same(kept(converted), kept(plain), **close)
        for net, result in ((converted, found), (plain, expected)):
            net.zero_grad()
            result.square().mean().backward()
        for weight, its in zip(converted.parameters(), plain.parameters(), strict=True):
            assert (weight.grad is None) == (its.grad is None)
            if weight.grad is not None:
                same(weight.grad.float(), its.grad, rtol=close["rtol"], atol=close["atol"])


@pytest.mark.parametrize("body", [*ONE_GRAPH, appended, cleared_first, by_name])
def test_one_graph_holds_for_all_calls(body):
    _, model = pair(body)
    converted = fxamp.convert(model, LOW, capture="symbolic")
    for step in range(6):
        converted.losses.clear()
        converted(inputs(step))
    made = engine_of(converted).all_variants()
    assert len(made) <= (1 if body in (*ONE_GRAPH, appended) else 2)
    assert all(head.dtype is torch.float32 for head in converted.heads)
    assert all(variant.captured.method == "symbolic" for variant in made)


def test_what_was_put_there_by_others_is_no_item_of_the_graphs():
    _, model = pair(deep_supervision)
    converted = fxamp.convert(model, LOW, **EXACT)
    converted(inputs(0))
    converted.heads[:] = ["anything", 7]
    found = converted(inputs(1))
    same(list(found[1:]), [head.relu() for head in converted.heads])
    assert len(engine_of(converted).all_variants()) == 1
    converted.heads.append(torch.full((4, 8), 5.0))  # which the graph would not read
    assert len(converted(inputs(1))) == 4


def test_whether_a_key_is_there_is_asked_at_each_call():
    def body(net, x):
        y = net.fc(x) * (2 if "more" in net.seen else 1)
        net.seen["more"] = y
        return y

    plain, model = pair(body)
    converted = fxamp.convert(model, LOW, **EXACT)
    for step, held in enumerate([{}, {"more": None}, {"more": 3}, {"more": None}, {}]):
        for net in (plain, converted):
            net.seen.clear()
            net.seen.update(held)
        same(converted(inputs(step)), plain(inputs(step)))


def test_keys_are_in_the_order_of_each_call():
    def body(net, x):
        for place, key in enumerate(net.seen):
            net.seen[key] = net.fc(x) * place
        return list(net.seen.values())[-1]

    plain, model = pair(body)
    converted = fxamp.convert(model, LOW, **EXACT)
    for step, keys in enumerate(["ab", "ba", "ab", "abc"]):
        for net in (plain, converted):
            net.seen.clear()
            net.seen.update(dict.fromkeys(keys, 7))
        same(converted(inputs(step)), plain(inputs(step)))
        same(kept(converted), kept(plain))


def test_a_list_that_is_exchanged_in_one_of_its_places_is_two():
    plain, model = pair(deep_supervision)
    converted = fxamp.convert(model, LOW, **EXACT)
    for step in range(4):
        for net in (plain, converted):
            if step == 2:
                net.heads = [torch.full((4, 8), 3.0)] * 2  # which is read, and no longer written
        same(converted(inputs(0)), plain(inputs(0)))
        same(kept(converted), kept(plain))


def test_gradients_flow_through_what_is_set():
    plain, model = pair(appended)
    converted = fxamp.convert(model, LOW)
    for net in (plain, converted):
        result = net(inputs(0))
        (result.mean() + net.losses[0] + net.losses[1][0].sum()).backward()
    same(converted.fc.weight.grad, plain.fc.weight.grad, rtol=0.05, atol=0.05)
    assert plain.fc.weight.grad.abs().sum() > 0


def test_copies_have_lists_of_their_own():
    plain, model = pair(deep_supervision)
    converted = fxamp.convert(model, LOW, **EXACT)
    expected = plain(inputs(0))
    twins = [copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))]
    for net in (converted, *twins):
        same(net(inputs(0)), expected)
        assert net.skips[0].heads is net.heads
    assert len({id(net.heads) for net in (converted, *twins)}) == 3
    twins[0](inputs(1))
    same(converted.heads, plain.heads)


def test_nothing_is_set_before_the_first_call():
    _, model = pair(deep_supervision)
    before = list(model.heads)
    converted = fxamp.convert(model, LOW, example_inputs=(inputs(0),), capture="symbolic")
    assert all(one is other for one, other in zip(converted.heads, before, strict=True))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (an_average, r"forward sets self\.ordered\['last'\], and hangs on what that held before"),
        (by_the_last_shape, r"forward sets self\.heads\[0\], and hangs on what that held before"),
        (in_another_container, r"forward writes into self\.nested"),
        (taken_out, r"forward writes into self\.ordered"),
    ],
)
def test_what_a_graph_cannot_set_is_refused_by_name(body, said):
    _, model = pair(body)
    before = copy.copy(model.ordered), list(model.heads), copy.deepcopy(model.nested)
    with pytest.raises(CaptureError, match=said):
        fxamp.convert(model, LOW, capture="symbolic", example_inputs=(inputs(0),))
    same((copy.copy(model.ordered), list(model.heads), model.nested), before)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = [torch.zeros(2, 8)]
        self.fc, self.reader = nn.Linear(8, 8), Reader(self.heads)

    def forward(self, x):
        self.heads[0] = self.fc(x)
        return self.reader(x)


class Reader(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, x):
        return x + self.heads[0]


def test_a_module_that_stays_whole_sees_what_is_set():
    torch.manual_seed(0)
    model = Hooked()
    model.reader.register_forward_hook(lambda *given: None)
    plain, converted = copy.deepcopy(model), fxamp.convert(model, LOW, **EXACT)
    for step in (0, 1):
        same(converted(inputs(step)), plain(inputs(step)))


@pytest.mark.parametrize("body", [deep_supervision, by_name, appended])
def test_a_look_at_a_model_sets_nothing(body):
    plain, model = pair(body)
    converted = fxamp.convert(model, LOW)
    converted(inputs(0))
    before = {name: copy.copy(value) for name, value in kept(converted).items()}
    looks = (
        lambda: fxamp.find_nan(converted, inputs(1)),
        lambda: fxamp.compare(plain, converted, inputs(1)),
        lambda: fxamp.report(converted).suggest(),
        lambda: fxamp.profile(plain, [inputs(1)], progress=False),
    )
    its = {name: copy.copy(value) for name, value in kept(plain).items()}
    for look in looks:
        look()
        for net, held in ((converted, before), (plain, its)):
            for name, value in kept(net).items():
                assert len(value) == len(held[name])
                now, then = (each.values() if isinstance(each, dict) else each for each in (value, held[name]))
                assert all(one is other for one, other in zip(now, then, strict=True))


@pytest.mark.parametrize("body", [deep_supervision, by_name, appended, cleared_first, written_afterwards])
def test_items_are_set_under_torch_compile(body, fresh_dynamo):
    plain, model = pair(body)
    converted = fxamp.convert(model, LOW)
    compiled = torch.compile(converted, backend="eager")
    for step in range(4):
        for net in (converted, plain):
            net.losses.clear()
        same(compiled(inputs(step)), plain(inputs(step)), rtol=0.05, atol=0.1)
        same(kept(converted), kept(plain), rtol=0.05, atol=0.1)


class BySize(nn.Module):
    """Keeps something for each number of rows, in a dictionary."""

    def __init__(self, keep):
        super().__init__()
        self.keep, self.kept = keep, {}
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.keep(self.kept, x.shape[0]) @ self.fc(x)


def mask_of(kept, rows):
    if rows not in kept:
        kept[rows] = torch.tril(torch.ones(rows, rows))
    return kept[rows]


def new_mask_of(kept, rows):
    kept[rows] = torch.tril(torch.ones(rows, rows))
    return kept[rows]


def mask_of_the_longest(kept, rows):
    kept[rows] = torch.tril(torch.ones(rows, rows))
    return kept[max(kept)][:rows, :rows] * len(kept)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 5, 4, 6)], ids=str)
@pytest.mark.parametrize("keep", [mask_of, new_mask_of, mask_of_the_longest])
def test_what_is_kept_for_a_size_is_kept_for_a_number(keep, sizes, is_given):
    torch.manual_seed(0)
    net = BySize(keep)
    eager = copy.deepcopy(net)
    converted = fxamp.convert(net, LOW, (torch.randn(4, 8),) if is_given else None, **EXACT)
    assert converted.kept == {}
    for rows in sizes:
        x = torch.randn(rows, 8)
        assert torch.equal(converted(x), eager(x))
        assert list(map(type, converted.kept)) == [int] * len(eager.kept)
        assert sorted(converted.kept) == sorted(eager.kept)
    pickle.loads(pickle.dumps(converted))

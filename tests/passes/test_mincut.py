"""The exact colouring against trying every colouring."""

import dataclasses
import itertools
import random

import networkx as nx
import pytest

from fxamp.passes.mincut import HIGH, LOW, Problem, SharedValue, solve
from tests.work import lines


def cost(problem, sides):
    """Total cost of a full assignment, None where it breaks an implication."""
    whole = {**sides, **problem.fixed}
    if any(whole[above] == LOW and whole[below] == HIGH for above, below in problem.implies):
        return None
    total = sum(price for variable, price in problem.high_cost.items() if whole[variable] == HIGH)
    for value in problem.values:
        made = whole[value.producer]
        if made == HIGH and any(whole[reader] == LOW for reader in (*value.readers, *value.promoting)):
            total += value.to_low
        if made == LOW:
            inside = value.inside * sum(whole[reader] == HIGH for reader in value.promoting)
            is_needed = any(whole[reader] == HIGH for reader in value.readers)
            total += value.to_high if is_needed else min(inside, value.to_high)
    return total


def every_colouring(problem):
    """All assignments of the free variables that break no implication, with their costs."""
    for sides in itertools.product((LOW, HIGH), repeat=len(problem.free)):
        assignment = dict(zip(problem.free, sides, strict=True))
        price = cost(problem, assignment)
        if price is not None:
            yield price, assignment


def best_low_sides(problem):
    """The low sides of all cheapest colourings."""
    found = list(every_colouring(problem))
    cheapest = min(price for price, _ in found)
    return cheapest, [low_side(sides) for price, sides in found if price == cheapest]


def low_side(sides):
    return frozenset(variable for variable, side in sides.items() if side == LOW)


def random_problem(rng):
    """Up to nine free variables, some fixed, values with one to four readers, prices, implications to the fixed."""
    free = tuple(range(rng.randint(1, 9)))
    fixed = {HIGH: HIGH, LOW: LOW, **{f"fixed {n}": rng.choice((LOW, HIGH)) for n in range(rng.randint(0, 3))}}
    everything = [*free, *fixed]
    values = []
    for _ in range(rng.randint(1, 12)):
        producer = rng.choice(everything)
        readers = frozenset(rng.choice(everything) for _ in range(rng.randint(1, 4))) - {producer}
        promoting = tuple(rng.choice(everything) for _ in range(max(0, rng.randint(-3, 3))))
        if readers or promoting:
            values.append(
                SharedValue(producer, readers, rng.randint(0, 4), rng.randint(0, 4), promoting, rng.randint(0, 3))
            )
    prices = {variable: rng.randint(0, 3) for variable in free if rng.random() < 0.4}
    implies = tuple(
        (rng.choice(free), rng.choice((*free, HIGH))) for _ in range(rng.randint(0, 3)) if rng.random() < 0.5
    )
    return Problem(free, fixed, tuple(values), prices, implies)


@pytest.mark.parametrize("seed", range(10))
def test_the_cut_is_the_largest_low_side_of_all_cheapest_colourings(seed):
    rng = random.Random(seed)
    for _ in range(250):
        problem = random_problem(rng)
        sides = solve(problem)
        cheapest, low_sides = best_low_sides(problem)
        assert cost(problem, sides) == cheapest, problem
        largest = frozenset().union(*low_sides)
        assert largest in low_sides, "the cheapest colourings are closed under union"
        assert low_side(sides) == largest, problem


def test_the_colouring_does_not_depend_on_order():
    rng = random.Random(7)
    for _ in range(200):
        problem = random_problem(rng)
        sides = solve(problem)
        for _ in range(3):
            shuffled = dataclasses.replace(
                problem,
                free=tuple(rng.sample(problem.free, len(problem.free))),
                values=tuple(rng.sample(problem.values, len(problem.values))),
                implies=tuple(rng.sample(problem.implies, len(problem.implies))),
                fixed=dict(rng.sample(list(problem.fixed.items()), len(problem.fixed))),
            )
            assert solve(shuffled) == sides


def test_the_cost_function_refuses_a_broken_implication():
    problem = Problem(("a", "b"), {}, (), {}, (("a", "b"),))
    assert cost(problem, {"a": LOW, "b": HIGH}) is None
    assert cost(problem, {"a": HIGH, "b": LOW}) == 0


@pytest.mark.parametrize(
    "values, prices, implies, expected",
    [
        # a tie goes low
        ([("a", [HIGH]), ("low", ["a"])], {}, [], {"a": LOW}),
        # one cast serves all readers of a value: keeping it low costs one, moving both readers high costs two
        ([("low", ["a", "b"]), ("a", [HIGH]), ("b", [HIGH])], {}, [], {"a": HIGH, "b": HIGH}),
        # running high has a price
        ([("high", ["a"]), ("a", [HIGH])], {"a": 3}, [], {"a": LOW}),
        ([("high", ["a"]), ("a", [HIGH])], {"a": 1}, [], {"a": HIGH}),
        # b high forces a high
        (
            [("b", [HIGH]), ("high", ["b"]), ("high", ["b", HIGH]), ("low", ["a"]), ("a", [LOW])],
            {},
            [("a", "b")],
            {"a": HIGH, "b": HIGH},
        ),
        # what nobody prices is low
        ([], {}, [], {"a": LOW}),
    ],
)
def test_small_problems(values, prices, implies, expected):
    fixed = {HIGH: HIGH, LOW: LOW, "low": LOW, "high": HIGH}
    shared = tuple(SharedValue(producer, frozenset(readers), 1, 1) for producer, readers in values)
    assert solve(Problem(tuple(expected), fixed, shared, prices, tuple(implies))) == expected


def test_the_solver_agrees_with_networkx_on_larger_problems():
    rng = random.Random(3)
    for _ in range(20):
        problem = chain_problem(rng, 120)
        assert cost(problem, solve(problem)) == networkx_cost(problem)


def chain_problem(rng, length):
    """One component: a chain with random side exits and skips."""
    free = tuple(range(length))
    fixed = {HIGH: HIGH, LOW: LOW, "start": rng.choice((LOW, HIGH))}
    values = [SharedValue("start", frozenset({0}), 5, 5)]
    for position in range(length - 1):
        readers = {position + 1, *rng.sample((HIGH, LOW, min(position + 7, length - 1)), rng.randint(0, 2))}
        values.append(SharedValue(position, frozenset(readers - {position}), rng.randint(1, 9), rng.randint(1, 9)))
    return Problem(free, fixed, tuple(values), {n: rng.randint(0, 2) for n in free}, ())


def networkx_cost(problem):
    """The same network, written down plainly, cut by networkx."""
    graph = nx.DiGraph()
    side = lambda variable: problem.fixed.get(variable, variable)  # noqa: E731
    add = lambda a, b, c: graph.add_edge(a, b, capacity=graph.get_edge_data(a, b, {"capacity": 0})["capacity"] + c)  # noqa: E731
    for number, value in enumerate(problem.values):
        add(side(value.producer), ("up", number), value.to_high)
        add(("down", number), side(value.producer), value.to_low)
        for reader in value.readers:
            graph.add_edge(("up", number), side(reader))
            graph.add_edge(side(reader), ("down", number))
    for variable, price in problem.high_cost.items():
        add(LOW, variable, price)
    return nx.minimum_cut_value(graph, LOW, HIGH)


def test_a_long_chain_of_free_nodes_is_near_linear():
    rng = random.Random(5)
    small, large = chain_problem(rng, 1_000), chain_problem(rng, 8_000)
    one, eight = lines(lambda: solve(small)), lines(lambda: solve(large))
    assert eight <= 1.5 * 8 * one, f"{one:,} lines executed for 1,000 variables, {eight:,} for 8,000"

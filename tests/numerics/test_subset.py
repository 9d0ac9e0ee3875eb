"""Small sets that pass a test, found in few runs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxamp.numerics.hitting_sets import TooHard, smallest_hitting_set
from fxamp.numerics.subset import SubsetSearch

NAMES = "abcdefgh"
FAMILIES = st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=6)


def search(*enough, max_runs=64):
    """A search whose sets pass where they hold one of `enough` whole."""
    return SubsetSearch(lambda names: float(not any(set(each) <= set(names) for each in enough)), 0.0, max_runs)


def found(sets, candidates):
    chosen, _ = sets.reduced(sets.shortest_prefix(candidates))
    names, is_smallest = sets.smallest(chosen, candidates)
    return "".join(sorted(names)), is_smallest


@pytest.mark.parametrize(
    ("enough", "smallest"),
    [
        (("abc",), "abc"),
        (("abc", "de"), "de"),
        (("abc", "h"), "h"),
        (("abcd", "efg", "hi"), "hi"),
        (("abcd", "l"), "l"),
        (("abcde", "h"), "h"),
        (("abc", "mn"), "mn"),
        (("abcdefgh",), "abcdefgh"),
        (("abcdefgh", "ijklmn"), "ijklmn"),
    ],
)
def test_the_smallest_set_is_found_and_known_to_be(enough, smallest):
    assert found(search(*enough, max_runs=400), "abcdefghijklmnop") == (smallest, True)


@pytest.mark.parametrize("pair", list(itertools.combinations(NAMES, 2)))
def test_every_pair_is_found_in_few_runs(pair):
    sets = search("abc", "".join(pair))
    assert found(sets, NAMES) == ("".join(pair), True) and sets.runs < 64


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("first", [0, 40])
def test_each_of_some_nodes_that_is_needed_costs_one_run_to_prove(count, first):
    candidates = [str(number) for number in range(100)]
    needed = candidates[first : first + 5 * count : 5]
    sets = search(needed, max_runs=100)
    chosen, _ = sets.reduced(sets.shortest_prefix(candidates))
    before = sets.runs
    assert sets.smallest(chosen, candidates) == (needed, True)
    assert sets.runs <= before + count


@given(FAMILIES)
def test_what_is_called_the_smallest_is(enough):
    every = set().union(*enough)
    sets = search(*enough, max_runs=10_000)
    names, is_smallest = found(sets, sorted(every))
    assert is_smallest and set(names) in enough and len(names) == min(map(len, enough))


@given(FAMILIES, st.integers(2, 40))
def test_with_few_runs_it_is_called_so_only_where_it_is(enough, max_runs):
    sets = search(*enough, max_runs=max_runs)
    names, is_smallest = found(sets, NAMES)
    assert sets.runs <= max_runs and (names == NAMES or sets.known[frozenset(names)] == 0.0)
    assert not is_smallest or len(names) == min(map(len, enough))


def test_a_set_that_fails_though_it_holds_one_that_passes_proves_nothing():
    """Two roundings may cancel: with one of them gone the error is larger."""
    sets = SubsetSearch(lambda names: float(set(names) == set("abcdefg") or not set(names) & set("bc")), 0.0, 500)
    assert sets.passes("bc") and not sets.passes("abcdefg")
    assert sets.smallest("bc", NAMES) == (["b"], True)


def test_where_a_name_has_done_harm_nothing_is_called_the_smallest():
    """Equal branches that are subtracted: with one of them in float32 they differ."""
    errors = {frozenset(): 0.3, frozenset("a"): 17.0, frozenset("b"): 17.0, frozenset("c"): 0.0}
    sets = SubsetSearch(lambda names: errors.get(frozenset(names), 0.0 if {*"ab"} <= {*names} else 17.0), 0.1, 50)
    assert not sets.passes("") and sets.smallest("ab", "abc") == (["c"], True)
    del errors[frozenset("c")]
    sets.known.clear()
    assert not sets.passes("") and sets.smallest("ab", "abc") == ("ab", False)


def test_a_smaller_set_that_is_known_to_pass_needs_no_run():
    sets = search("abc", "a", max_runs=3)
    assert sets.passes("a") and sets.passes("abc") and not sets.passes("b")
    assert sets.smallest("abc", "abc") == (["a"], True) and sets.runs == 3


def test_what_is_part_of_a_set_that_failed_is_not_tried():
    sets = search("abc")
    sets.passes("abdefghijkl")
    before = sets.runs
    assert sets.smallest("abc", "abcdefghijkl") == ("abc", True)
    assert all("c" in key for key in list(sets.known)[before:])


@given(FAMILIES, st.integers(0, 5))
def test_a_hitting_set_is_as_small_as_any(sets, most):
    subsets = (set(names) for size in range(len(NAMES) + 1) for names in itertools.combinations(NAMES, size))
    smallest = next(len(names) for names in subsets if all(names & each for each in sets))
    names = smallest_hitting_set([frozenset(each) for each in sets], most, NAMES)
    if smallest > most:
        assert names is None
    else:
        assert len(names) == len(set(names)) == smallest and all(set(names) & each for each in sets)


def test_of_alternatives_the_first_is_taken():
    assert smallest_hitting_set([frozenset("db"), frozenset("ca")], 2, NAMES) == ["a", "b"]


def test_a_search_that_is_too_long_ends():
    names = [str(number) for number in range(60)]
    sets = [frozenset(chosen) for chosen in itertools.combinations(names[:24], 3)][::7]
    with pytest.raises(TooHard):
        smallest_hitting_set(sets, 20, names)


@settings(deadline=None)
@given(st.integers(0, 3))
def test_where_it_is_too_long_nothing_is_called_the_smallest(seed):
    names = [str(number) for number in range(30)]
    weights = {name: 1.0 + (number * (seed + 3)) % 7 / 50 for number, name in enumerate(names)}
    sets = SubsetSearch(lambda chosen: sum(weights.values()) - sum(map(weights.get, chosen)), 15.0, 200)
    chosen, _ = sets.reduced(sets.shortest_prefix(names))
    assert sets.smallest(chosen, names) == (chosen, False)

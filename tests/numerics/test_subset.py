"""Small sets that pass a test, found in few runs."""

import itertools

import pytest

from fxamp.numerics.subset import SubsetSearch


def search(*enough, max_runs=64):
    """A search whose sets pass where they hold one of `enough` whole."""
    return SubsetSearch(lambda names: float(not any(set(each) <= set(names) for each in enough)), 0.0, max_runs)


def found(sets, candidates):
    chosen, _ = sets.reduced(sets.shortest_prefix(candidates))
    return "".join(sorted(sets.smaller(chosen, candidates)))


@pytest.mark.parametrize(
    ("enough", "smallest"),
    [
        (("abc",), "abc"),
        (("abc", "de"), "de"),
        (("abc", "h"), "h"),
        (("abcd", "efg", "hi"), "hi"),
        (("abcd", "l"), "l"),
        (("abcde", "h"), "abcde"),  # of five names none smaller is looked for
        (("abc", "mn"), "abc"),  # behind the first twelve
    ],
)
def test_a_smaller_set_is_found_among_the_first(enough, smallest):
    assert found(search(*enough, max_runs=400), "abcdefghijklmnop") == smallest


@pytest.mark.parametrize("pair", itertools.combinations("abcdefgh", 2))
def test_every_pair_is_found_in_few_runs(pair):
    sets = search("abc", "".join(pair))
    assert found(sets, "abcdefgh") == "".join(pair) and sets.runs <= 40


def test_the_first_candidates_are_tried_first():
    assert found(search("abc", "bd", max_runs=20), "abcdefghijkl") == "bd"


def test_no_more_runs_are_made_than_allowed():
    for max_runs in range(2, 30):
        sets = search("abcd", "jk", max_runs=max_runs)
        assert found(sets, "abcdefghijklmnop") and sets.runs <= max_runs


def test_what_is_part_of_a_set_that_failed_is_not_tried():
    sets = search("abc")
    sets.passes("abdefghijkl")
    before = sets.runs
    assert sets.smaller("abc", "abcdefghijkl") == "abc"
    assert all("c" in key for key in list(sets.known)[before:])

"""Which underscores in a function begin the name of an attribute that it makes, and which join, or cut, other texts."""

import pytest

from fxamp.capture.functions_of import beginnings_in, codes_of


def built(x):
    return getattr(x, f"_{x}")


def built_of_two(x):
    return getattr(x, f"_{x.a[0]['b']}_{x.c(1, d=2)}" + "_of")


def added(x):
    return getattr(x, "_" + x.name)


def added_in_brackets(x):
    return getattr(x, ("_" + x.name).lower())


def chosen(x):
    return getattr(x, f"{'_' if x else ''}{x}")


def kept(x):
    prefix = "_"
    return getattr(x, prefix + x.name)


def returned(x):
    return "_"


def key_of_a_dictionary(x):
    return {f"_{part}": part for part in x}


def with_a_text(x):
    return getattr(x, f"output_{x}")


def joined(x):
    return "_".join(x)


def cut(x):
    return x.split("_")[0], x.startswith("_"), x.replace("_", "."), "_" in x, x == "_", x["_"], x.get("_", 1)


def between(x):
    return f"{x}_{x.y}", x + "_" + x.y, f"{x}_"


def behind_others(x):
    return {key + f"_{place}": value for place in range(3) for key, value in x.items()}, x + ("_" + x.y)


BEGIN = (built, built_of_two, added, added_in_brackets, chosen, kept, returned, key_of_a_dictionary)


@pytest.mark.parametrize("function", (*BEGIN, with_a_text, joined, cut, between, behind_others))
def test_which_begin_names(function):
    found = set().union(*map(beginnings_in, codes_of(function.__code__)))
    assert found == ({"_"} if function in BEGIN else {"output_"} if function is with_a_text else set())

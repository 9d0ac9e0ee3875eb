"""Who began, where that stands in code around the graphs."""

import dataclasses
from collections.abc import Iterable

import torch

from fxamp.numerics.flow import CallFlow, Made
from fxamp.numerics.origin import Origin, is_of_output


def made_around(call: CallFlow, exact: CallFlow, origin: Origin | None) -> Made | None:
    """What code around the graphs made, where that explains what is bad: what came in, what is given or has stopped the
    run, or a gradient.

    Of several the first that an fp32 run has not; that one also where nothing else is bad.

    Args:
        origin: what the graphs alone say.
    """
    if origin is not None and not is_of_output(origin):
        arrived = call.arrived.get((origin.flow.part.number, origin.node))
        return _first_behind([arrived], call, exact) if origin.phase == "between graphs" and arrived else None
    new = [made for made in call.made if made.is_new]
    if call.error is not None:
        return _first(new, exact)
    if not all(extent.is_finite for extent in call.outputs):
        return _first_behind(call.given, call, exact)
    has_bad_gradients = origin is not None or not all(extent.is_finite for extent in call.gradients.values())
    return call.unmade if has_bad_gradients else next(filter(lambda made: _is_only_mixed(made, exact), new), None)


def _first_behind(bad: list[Made], call: CallFlow, exact: CallFlow) -> Made | None:
    """Of what bad values come of, in the order of the run: an infinity comes before the NaN that it becomes."""
    begun = {id(each) for made in bad for each in made.begun_by()}
    return _first((made for made in call.made if id(made) in begun), exact)


def _first(among: Iterable[Made], exact: CallFlow) -> Made | None:
    """The first that fp32 has not, or else the first."""
    found = list(among)
    return next((made for made in found if _is_only_mixed(made, exact)), next(iter(found), None))


def _is_only_mixed(made: Made, exact: CallFlow) -> bool:
    return not any(made.is_as(other) for other in exact.made)


def given_back_inside(call: CallFlow, origin: Origin) -> Origin:
    """Of a bad gradient that comes to a graph's output, whether code of the model's makes it: what came to the outputs
    of the call was finite, and not too large to be made low."""
    top = torch.finfo(origin.extent.dtype).max
    came = [max(abs(extent.low or 0.0), abs(extent.high or 0.0)) for extent in call.came if extent.is_finite]
    is_inside = bool(came) and len(came) == len(call.came) and max(came) < top
    is_whole = call.parts[-1] is origin.flow and not call.made and len(call.parts) == 1
    if origin.phase not in ("backward", "sum of gradients") or not is_of_output(origin) or not is_inside or is_whole:
        return origin
    return dataclasses.replace(origin, phase="between graphs", weight="the gradient that comes back")


def of_gradient(call: CallFlow) -> Origin | None:
    """The last graph's output, where a parameter or an input gets a bad gradient that no graph has made."""
    bad = next(((name, extent) for name, extent in call.gradients.items() if not extent.is_finite), None)
    if bad is None or not call.parts:
        return None
    flow = call.parts[-1]
    output = flow.variant.graph.output_node()
    return Origin(output.name, "between graphs", bad[1], flow, weight=f"{bad[0]}'s gradient")

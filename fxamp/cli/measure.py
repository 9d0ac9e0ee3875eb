"""The commands that run a model, or compare saved results: diff, profile, compare, audit."""

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from fxamp.cli.targets import load_batches, load_loss, load_target, run_named
from fxamp.cli.types import LIMIT, OK
from fxamp.errors import FxampError, OptionError
from fxamp.instruments import audit, profile
from fxamp.numerics.bisect import find_deny
from fxamp.numerics.compare import compare
from fxamp.numerics.run import arguments
from fxamp.review.plan import load_plan
from fxamp.review.plan_diff import diff_fields, diff_plans, diff_text


def run_diff(chosen: argparse.Namespace) -> int:
    """0 where two plans are the same, 1 where they differ."""
    old, new = load_plan(chosen.old), load_plan(chosen.new)
    changes, text = diff_plans(old, new), diff_text(old, new)
    if chosen.json:
        nodes = [vars(change) for change in changes]
        found = {"equal": not text, "fields": diff_fields(old, new), "changes": nodes}
        print(json.dumps(found, indent=2), file=chosen.stdout)
    else:
        print(text or "the plans are equal")
    return LIMIT if text else OK


def run_profile(chosen: argparse.Namespace) -> int:
    """Measure ranges on real batches."""
    model, _ = load_target(chosen.target, [])
    batches = load_batches(chosen.batches)
    loss_fn = None if chosen.loss is None else load_loss(chosen.loss, ("output",), ("output", "targets"))
    ranges = profile(model, batches, loss_fn)
    print(json.dumps(ranges.as_dict()) if chosen.json else ranges, file=chosen.stdout)
    if chosen.save is not None:
        ranges.save(chosen.save)
    if chosen.plot is not None:
        ranges.plot(chosen.plot)
    return OK


def _with_inputs(chosen: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The target's model and the inputs of one call, which a command that runs the model needs."""
    model, example = load_target(chosen.target, chosen.input)
    if example is None:
        raise OptionError(
            f"there are no inputs to run {chosen.target} on: give --input SHAPE, such as --input 8x3x224x224, once for "
            "each argument of forward, or let the factory return (model, inputs)."
        )
    return model, example


_T = TypeVar("_T")


def _measured(chosen: argparse.Namespace, model: nn.Module, example: Any, measure: Callable[[], _T]) -> _T:
    """What `measure` gives. Where it fails, the model itself is run: if that fails too, it is told by its own line."""
    try:
        return measure()
    except FxampError:
        raise
    except Exception:
        args, kwargs = arguments(example)
        run_named(f"{chosen.target}, called with these inputs,", lambda: model(*args, **kwargs))
        raise


def run_compare(chosen: argparse.Namespace, converted: Any) -> int:
    """Every node against its fp32 value; with a tolerance, the deny entries that meet it."""
    model, example = _with_inputs(chosen)
    model.load_state_dict(converted.state_dict())
    loss_fn = None if chosen.loss is None else load_loss(chosen.loss, ("output",))
    result = _measured(chosen, model, example, lambda: compare(model, converted, example, loss_fn, chosen.scale))
    if chosen.tolerance is None:
        print(json.dumps(result.as_dict(), indent=2) if chosen.json else result, file=chosen.stdout)
        return OK
    found = find_deny(model, converted, example, chosen.tolerance, loss_fn, chosen.max_runs)
    print(json.dumps(found.as_dict(), indent=2) if chosen.json else found, file=chosen.stdout)
    return OK if found.is_met and not found.nodes else LIMIT


def run_audit(chosen: argparse.Namespace) -> int:
    """0 where there are no more findings of the severity `--fail-on` than allowed."""
    model, example = _with_inputs(chosen)
    found = _measured(chosen, model, example, lambda: audit(model, example))
    if chosen.sarif:
        print(found.to_sarif(), file=chosen.stdout)
    else:
        print(found.to_json() if chosen.json else found, file=chosen.stdout)
    grave = {"error": ("error",), "warning": ("error", "warning"), "never": ()}[chosen.fail_on]
    return LIMIT if any(finding.severity in grave for finding in found.findings) else OK

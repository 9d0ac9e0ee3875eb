"""Whether models still are what their graphs were made for: asked by whoever has recorded a call, and runs no Python of
theirs at the next one (torch.compile, a CUDA graph)."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from fxamp.capture.modes import follow_modules
from fxamp.ir import ENGINE
from fxamp.model.engine import Engine, engine_of
from fxamp.model.variant import Variant
from fxamp.module_hooks import hook_dictionaries


def question(model: Any, engine: Engine, variants: Sequence[Variant]) -> Callable[[Any], bool]:
    """Whether a model still is what graphs were made for. It keeps no model alive, and fails where one is gone."""
    known: Callable[[], Any] = weakref.ref(engine)
    graphs: list[Callable[[], Any]] = [weakref.ref(variant) for variant in variants]
    counts = _hooks_of_blocks(engine, model)

    def is_as_made(module: Any) -> bool:
        is_known = module.__dict__[ENGINE] is known() and known().is_current(module) and not follow_modules()
        is_known = is_known and _hooks_of_blocks(known(), module) == counts
        return is_known and all(graph().is_for_model(module) for graph in graphs)

    return is_as_made


def _hooks_of_blocks(engine: Engine, model: nn.Module) -> list[int]:
    """How many hooks the blocks have that are converted by themselves, which Dynamo does not guard."""
    blocks = map(model.get_submodule, engine.boundaries)
    return [len(hooks) for block in blocks for hooks in hook_dictionaries(block)]


class Recorded:
    """What a step that was recorded has taken for granted of converted models.

    Args:
        models: those that the step calls, or that hold those. Each part of theirs that is converted is asked.

    Attributes:
        modules: of the converted ones that have graphs, which know what they read.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.modules: set[nn.Module] = set()
        self._asked: list[tuple[Callable[[], Any], Callable[[Any], bool], list[Variant], list[Any]]] = []
        for module in dict.fromkeys(part for model in models for part in model.modules()):
            engine = engine_of(module)
            if engine is not None:
                variants = [each for each in engine.own_variants() if each.is_for_model(module)]
                numbers = [each.numbers_read(module) for each in variants]
                if variants:
                    self.modules.update(module.modules())
                self._asked.append((weakref.ref(module), question(module, engine, variants), variants, numbers))

    def holds(self) -> bool:
        """Whether the next step would do what this one did. Numbers that graphs read anew at each call are asked, too,
        for a recorded step does not."""
        return all(
            (module := known()) is not None
            and is_as_made(module)
            and [each.numbers_read(module) for each in variants] == numbers
            for known, is_as_made, variants, numbers in self._asked
        )

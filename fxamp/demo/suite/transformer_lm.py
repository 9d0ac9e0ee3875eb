"""A causal transformer over subwords."""

import functools

import torch

from fxamp.demo.suite.recurrent_lm import drawn_windows, perplexity
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.suite.text import Subwords, library, split
from fxamp.demo.tasks import CharacterModel, windows

SYMBOLS = 320


def transformer_lm(device: torch.device, steps: int = 150, batch: int = 8, context: int = 24) -> SuiteTask:
    """The demo's transformer on byte-pair symbols of the standard library's source."""
    learnt, tested = split(library().values())
    symbols = Subwords(learnt[:300_000], SYMBOLS)
    learnt_symbols, tested_symbols = (symbols.encode(text[:600_000]).to(device) for text in (learnt, tested))
    starts = torch.linspace(0, len(tested_symbols) - context - 1, 512).long()
    return SuiteTask(
        name="transformer_lm",
        title=f"causal transformer over {SYMBOLS} subwords; the source of Python's standard library",
        model=functools.partial(CharacterModel, context, width=32, heads=2, symbols=SYMBOLS),
        batches=lambda seed: iter(drawn_windows(learnt_symbols, steps, batch, context, seed)),
        held_out=windows(tested_symbols, starts, context),
        steps=steps,
        learning_rate=5e-3,
        metric=perplexity,
        measures="perplexity of a subword",
    )

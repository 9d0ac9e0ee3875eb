"""Hand-written models at published sizes, and the same at tiny ones: what the counter counts."""

from fxamp.counting.zoo.language import LANGUAGE
from fxamp.counting.zoo.step import Step
from fxamp.counting.zoo.vision import VISION

MODELS = {**VISION, **LANGUAGE}

__all__ = ["MODELS", "Step"]

"""The suite's tasks, one for each family of models in the guide."""

from collections.abc import Callable

from fxamp.demo.suite.adversarial import adversarial
from fxamp.demo.suite.classifier import classifier
from fxamp.demo.suite.detection import detection
from fxamp.demo.suite.flow import flow
from fxamp.demo.suite.masked_lm import masked_lm
from fxamp.demo.suite.recommender import recommender
from fxamp.demo.suite.recurrent_lm import recurrent_lm
from fxamp.demo.suite.segmentation import segmentation
from fxamp.demo.suite.spectrogram import spectrogram
from fxamp.demo.suite.speech import speech
from fxamp.demo.suite.task import SuiteTask
from fxamp.demo.suite.transformer_lm import transformer_lm
from fxamp.demo.suite.translation import translation

TASKS: dict[str, Callable[..., SuiteTask]] = {
    "classifier": classifier,
    "segmentation": segmentation,
    "detection": detection,
    "recurrent_lm": recurrent_lm,
    "transformer_lm": transformer_lm,
    "masked_lm": masked_lm,
    "translation": translation,
    "recommender": recommender,
    "speech": speech,
    "spectrogram": spectrogram,
    "flow": flow,
    "adversarial": adversarial,
}

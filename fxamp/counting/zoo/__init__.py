"""What the counter counts: models at published sizes, and the same at tiny ones."""

from fxamp.counting.zoo.from_torchvision import TORCHVISION
from fxamp.counting.zoo.from_transformers import TRANSFORMERS
from fxamp.counting.zoo.language import LANGUAGE
from fxamp.counting.zoo.sequences import SEQUENCES
from fxamp.counting.zoo.step import MakeStep, MissingPackageError, Step
from fxamp.counting.zoo.vision import VISION
from fxamp.counting.zoo.waveglow import waveglow

MODELS: dict[str, MakeStep] = {**VISION, **LANGUAGE}
"""Written by hand: they need nothing but torch."""

_ANY = {**MODELS, **SEQUENCES, "nn_transformer": LANGUAGE["transformer_base"], **TRANSFORMERS, **TORCHVISION}
_NAMES = """
    resnet18 resnet50 resnext101_32x4d mobilenet_v3_small efficientnet_b0 densenet121 vgg16_bn swin_t convnext_tiny
    vit_b_16 inception_v3 googlenet deeplabv3_resnet50 fcn_resnet50 ssd300_vgg16 r3d_18 unet se_resnext101_32x4d ncf
    lstm_lm gnmt tacotron2 jasper mlstm nn_transformer hf_bert_mlm hf_gpt2 hf_t5 hf_llama hf_vit hf_whisper
""".split()
PUBLISHED: dict[str, MakeStep] = {name: _ANY[name] for name in _NAMES}
"""Those of the means. torchvision's and transformers' are looked for when they are made."""

BESIDE: dict[str, MakeStep] = {"waveglow": waveglow}
"""Others of NVIDIA's guide, which are in no mean: goals were set for those above."""

COUNTED: dict[str, MakeStep] = {**PUBLISHED, **BESIDE}
"""Counted, and timed on a GPU, by default."""

__all__ = ["BESIDE", "COUNTED", "MODELS", "PUBLISHED", "MakeStep", "MissingPackageError", "Step"]

"""Models of Hugging Face's transformers at published sizes, from their configurations; nothing is downloaded."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from fxamp.counting.zoo.from_torchvision import torchvision_models
from fxamp.counting.zoo.step import MakeStep, MissingPackageError, Step, own_loss

Keywords = dict[str, Any]
"""Options of a configuration, or the arguments of one call."""


def transformers_package() -> Any:
    """transformers, also next to a torchvision that does not import by itself.

    Raises:
        MissingPackageError: it is not installed.
    """
    with contextlib.suppress(MissingPackageError):
        torchvision_models()  # which transformers imports, declared or not
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingPackageError("needs transformers (pip install transformers)") from error


def _step(
    kind: str, auto: str, published: Keywords, tiny_options: Keywords, call: Callable[[Any, bool], Keywords]
) -> MakeStep:
    """A model whose own loss is counted.

    Args:
        kind, auto: transformers' model type and auto class.
        published, tiny_options: what its configuration says.
        call: (configuration, tiny) -> keyword arguments of one call.
    """

    def make(tiny: bool) -> Step:
        package = transformers_package()
        config = package.AutoConfig.for_model(kind, **(tiny_options if tiny else published))
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return Step(getattr(package, auto).from_config(config), (), own_loss, call(config, tiny))

    return make


def _text(batch: int, length: int, has_mask: bool = False) -> Callable[[Any, bool], Keywords]:
    def call(config: Any, tiny: bool) -> Keywords:
        shape = (2, 8) if tiny else (batch, length)
        tokens = torch.randint(3, config.vocab_size, shape)
        mask = {"attention_mask": torch.ones(shape, dtype=torch.long)} if has_mask else {}
        return {"input_ids": tokens, "labels": tokens, **mask}

    return call


def _pairs(config: Any, tiny: bool) -> Keywords:
    source, target = ((2, 8), (2, 6)) if tiny else ((16, 128), (16, 64))
    return {
        "input_ids": torch.randint(3, config.vocab_size, source),
        "labels": torch.randint(3, config.vocab_size, target),
    }


def _images(config: Any, tiny: bool) -> Keywords:
    batch = 2 if tiny else 32
    images = torch.randn(batch, 3, config.image_size, config.image_size)
    return {"pixel_values": images, "labels": torch.randint(0, config.num_labels, (batch,))}


def _speech(config: Any, tiny: bool) -> Keywords:
    batch, length = (2, 6) if tiny else (8, 64)
    sound = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": sound, "labels": torch.randint(3, config.vocab_size, (batch, length))}


# Said here, because the model otherwise writes it into its own configuration at its first call.
_ONE_LABEL = {"problem_type": "single_label_classification"}
_LLAMA_1B = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 5632,
}  # fmt: skip
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_SMALL_GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
_SMALL_T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
_SMALL_WHISPER = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8,
    "max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip

TRANSFORMERS: dict[str, MakeStep] = {
    "hf_bert_mlm": _step("bert", "AutoModelForMaskedLM", {}, _SMALL, _text(16, 128, has_mask=True)),
    "hf_gpt2": _step("gpt2", "AutoModelForCausalLM", {}, _SMALL_GPT2, _text(8, 512)),
    "hf_t5": _step(
        "t5", "AutoModelForSeq2SeqLM", {"decoder_start_token_id": 0}, {**_SMALL_T5, "decoder_start_token_id": 0}, _pairs
    ),
    "hf_llama": _step("llama", "AutoModelForCausalLM", _LLAMA_1B, {**_SMALL, "pad_token_id": 0}, _text(4, 1024)),
    "hf_vit": _step(
        "vit", "AutoModelForImageClassification", {**_ONE_LABEL, "num_labels": 1000},
        {**_SMALL, "image_size": 16, "patch_size": 4, **_ONE_LABEL, "num_labels": 10}, _images,
    ),
    "hf_whisper": _step("whisper", "AutoModelForSpeechSeq2Seq", {}, _SMALL_WHISPER, _speech),
}  # fmt: skip

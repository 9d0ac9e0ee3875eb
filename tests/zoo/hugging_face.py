"""Architectures of Hugging Face's transformers, from small configurations; nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxamp.counting.zoo.from_transformers import transformers_package

Call = tuple[tuple[Any, ...], dict[str, Any]]

_TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_SMALL = {"max_position_embeddings": 32, **_TEXT}
_LLAMA = {**_SMALL, "num_key_value_heads": 1, "pad_token_id": 0}
_GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
_BART = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
_IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_VIT = {**_IMAGE, "image_size": 16, "patch_size": 4}


def text() -> dict[str, Any]:
    tokens = torch.randint(3, 64, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def tokens_only() -> dict[str, Any]:
    tokens = torch.randint(3, 64, (2, 10))
    return {"input_ids": tokens, "labels": tokens}


def pairs() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 64, (2, 9)), "labels": torch.randint(3, 64, (2, 7))}


def image(size: int = 16) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


# name -> (model type, auto class, configuration, inputs); use_cache is switched off in all of them.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "bert": ("bert", "AutoModelForMaskedLM", _SMALL, text),
    "roberta": ("roberta", "AutoModelForMaskedLM", {**_SMALL, "max_position_embeddings": 40}, text),
    "distilbert": (
        "distilbert", "AutoModelForMaskedLM",
        {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32},
        text,
    ),
    "albert": ("albert", "AutoModelForMaskedLM", {**_SMALL, "embedding_size": 8}, text),
    "electra": ("electra", "AutoModelForMaskedLM", {**_SMALL, "embedding_size": 8}, text),
    "deberta_v2": (
        "deberta-v2", "AutoModelForMaskedLM",
        {**_SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, text,
    ),
    "mpnet": ("mpnet", "AutoModelForMaskedLM", {**_SMALL, "max_position_embeddings": 40}, text),
    "gpt2": ("gpt2", "AutoModelForCausalLM", _GPT2, text),
    "gpt_neo": (
        "gpt_neo", "AutoModelForCausalLM",
        {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32,
         "attention_types": [[["global", "local"], 1]], "window_size": 4}, text,
    ),
    "gptj": ("gptj", "AutoModelForCausalLM", {**_GPT2, "rotary_dim": 4}, text),
    "gpt_neox": ("gpt_neox", "AutoModelForCausalLM", _SMALL, text),
    "opt": (
        "opt", "AutoModelForCausalLM",
        {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
         "word_embed_proj_dim": 16, "max_position_embeddings": 32}, text,
    ),
    "bloom": ("bloom", "AutoModelForCausalLM", {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}, text),
    "llama": ("llama", "AutoModelForCausalLM", _LLAMA, text),
    "mistral": ("mistral", "AutoModelForCausalLM", _LLAMA, text),
    "qwen2": ("qwen2", "AutoModelForCausalLM", _LLAMA, text),
    "gemma": ("gemma", "AutoModelForCausalLM", {**_LLAMA, "head_dim": 8}, text),
    "phi": ("phi", "AutoModelForCausalLM", {**_SMALL, "partial_rotary_factor": 0.5}, text),
    "mixtral": ("mixtral", "AutoModelForCausalLM", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, text),
    "falcon": ("falcon", "AutoModelForCausalLM", _TEXT, text),
    "mamba": (
        "mamba", "AutoModelForCausalLM",
        {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, tokens_only,
    ),
    "t5": (
        "t5", "AutoModelForSeq2SeqLM",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
         "decoder_start_token_id": 0}, pairs,
    ),
    "bart": ("bart", "AutoModelForSeq2SeqLM", _BART, pairs),
    "pegasus": ("pegasus", "AutoModelForSeq2SeqLM", _BART, pairs),
    "vit": ("vit", "AutoModelForImageClassification", _VIT, image),
    "beit": ("beit", "AutoModelForImageClassification", _VIT, image),
    "convnext": (
        "convnext", "AutoModelForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4}, lambda: image(32),
    ),
    "resnet": (
        "resnet", "AutoModelForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, lambda: image(32),
    ),
    "swin": (
        "swin", "AutoModelForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
        image,
    ),
    "wav2vec2": (
        "wav2vec2", "AutoModelForCTC",
        {**_IMAGE, "vocab_size": 16, "conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8],
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "mask_time_prob": 0.0, "layerdrop": 0.0},
        lambda: {"input_values": torch.randn(2, 400)},
    ),
    "whisper": (
        "whisper", "AutoModelForSpeechSeq2Seq",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0,
         "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": [],
         "begin_suppress_tokens": []},
        lambda: {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 64, (2, 6))},
    ),
}  # fmt: skip


def make(name: str) -> nn.Module:
    transformers = transformers_package()
    kind, auto, options, _ = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(kind, **options)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return getattr(transformers, auto).from_config(config)


def call(name: str) -> Call:
    torch.manual_seed(1)
    return (), ARCHITECTURES[name][3]()

"""Vision-language models lay out images of many sizes by loops over their grids, and number text and images by runs."""

import copy

import pytest
import torch

import fxamp
from fxamp.model.engine import engine_of

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"depth": 2, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
IMAGE, BEGIN, END = 190, 192, 193
TOKENS = {"image_token_id": IMAGE, "video_token_id": 191, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
# Two images in each: of these heights and widths, in patches.
GRIDS = [((4, 4), (4, 8)), ((4, 4), (4, 4)), ((8, 4), (4, 8)), ((4, 12), (8, 8)), ((4, 4), (4, 8))]


def _qwen2():
    vision = {**VISION, "embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=TEXT, vision_config=vision, **TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen3():
    vision = {**VISION, "hidden_size": 48, "intermediate_size": 64, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {**TEXT, "head_dim": 16}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config)


MODELS = {"Qwen2VLConfig": _qwen2, "Qwen3VLConfig": _qwen3}


def _batch(grids, seed):
    generator = torch.Generator().manual_seed(seed)

    def words(many):
        return torch.randint(3, 180, (many,), generator=generator).tolist()

    rows = [[*words(3 + seed), BEGIN, *[IMAGE] * (high * wide // 4), END, *words(5)] for high, wide in grids]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    many = sum(high * wide for high, wide in grids)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "labels": ids.masked_fill(ids == 0, -100),
        "pixel_values": torch.randn(many, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([(1, *grid) for grid in grids]),
    }


def _loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MODELS)
def test_images_of_any_size_are_one_graph(name, level):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    model = MODELS[name]()
    batches = [_batch(grids, seed) for seed, grids in enumerate(GRIDS)]
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, batches[0], level)
    for batch in batches:
        expected, exact = _loss_and_gradients(model, batch)
        found, gradients = _loss_and_gradients(converted, batch)
        assert abs(found - expected) < expected * 2**-8
        assert gradients.keys() == exact.keys()
        error = sum((gradients[each] - exact[each]).square().sum() for each in exact).sqrt()
        assert error < sum(each.square().sum() for each in exact.values()).sqrt() * 2**-4
    variants = engine_of(converted).all_variants()
    assert {variant.captured.method for variant in variants} == {"symbolic"}
    assert len(variants) <= 3, "the first, one for other sizes, and one for the positions that the model keeps by then"
    gemms = [row for row in fxamp.report(converted).rows if row.op in ("linear", "conv3d")]
    assert gemms and {row.precision for row in gemms} == {"low"}

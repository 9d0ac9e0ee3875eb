"""Decoders of transformers as they are used: trained with their cache on, and generating between the steps."""

import concurrent.futures
import copy

import pytest
import torch

import fxamp
from fxamp.errors import CaptureError

transformers = pytest.importorskip("transformers", reason="the models of this test come from transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"vocab_size": 64, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}
SMALL = {**SIZES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BART = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 64))}
HEADS = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**SIZES, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", SMALL),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**SIZES, "d_model": 32, **BART, **HEADS}),
}
TOKENS = torch.arange(2, 18).reshape(2, 8)


def model_of(name):
    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    with torch.no_grad():  # tokens then differ by more than low precision loses
        made.get_output_embeddings().weight.mul_(20.0)
    return made.train()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_its_cache_and_generates_in_between(name, opt_level):
    torch._dynamo.reset()
    plain, model = model_of(name), model_of(name)
    example = ((TOKENS,), {"labels": TOKENS})
    converted = fxamp.convert(model, torch.bfloat16, opt_level=opt_level, example_inputs=example)
    assert fxamp.report(converted).captures == ("symbolic",)
    nets = (plain.eval(), converted.eval())
    with torch.no_grad():
        expected, found = (net(TOKENS, labels=TOKENS) for net in nets)
    assert type(found.past_key_values) is type(expected.past_key_values) and found.keys() == expected.keys()
    torch.testing.assert_close(found.logits, expected.logits, rtol=0.05, atol=0.2)
    for _ in range(2):
        told = [plain.generate(TOKENS, max_new_tokens=6, do_sample=False)]
        with torch.autocast("cpu", torch.bfloat16, enabled=opt_level == "O2"):  # for the encoder that it calls itself
            told += [converted.generate(TOKENS, max_new_tokens=6, do_sample=False)]
        assert torch.equal(*told), "generation"
        converted.train()
        converted(TOKENS, labels=TOKENS).loss.backward()
        assert all(parameter.grad is not None for parameter in converted.parameters() if parameter.requires_grad)
        converted.eval()


def test_the_cache_of_one_call_serves_the_next():
    torch._dynamo.reset()
    plain, model = model_of("gpt2").eval(), model_of("gpt2").eval()
    converted = fxamp.convert(model, torch.bfloat16)
    with torch.no_grad():
        results = []
        for net in (plain, converted):
            cache = net(TOKENS, use_cache=True).past_key_values
            results.append(net(TOKENS[:, -1:], past_key_values=cache).logits)
            assert cache.get_seq_length() == TOKENS.shape[1] + 1
    torch.testing.assert_close(*results, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_a_training_call_that_no_graph_can_hold_runs_as_written_where_weights_are_low(opt_level):
    plain = model_of("gpt2").eval()
    model = fxamp.convert(copy.deepcopy(plain), torch.bfloat16, opt_level=opt_level, example_inputs=(TOKENS,))
    logits = [each(TOKENS[:, -1:], past_key_values=cache_of(each)).logits for each in (model, plain)]
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.2)
    logits[0].square().mean().backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters())
    refusing = fxamp.convert(plain, torch.bfloat16, opt_level=opt_level, example_inputs=(TOKENS,), capture="symbolic")
    with pytest.raises(CaptureError, match="DynamicCache"):
        refusing(TOKENS[:, -1:], past_key_values=cache_of(refusing))


def cache_of(model):
    return model(TOKENS[:, :-1], use_cache=True).past_key_values


def test_threads_that_generate_with_one_model_at_o2_wait_for_each_other():
    model = fxamp.convert(model_of("bloom").eval(), torch.bfloat16, opt_level="O2", example_inputs=(TOKENS,))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    expected = model.generate(TOKENS, max_new_tokens=6, do_sample=False)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = [pool.submit(model.generate, TOKENS, max_new_tokens=6, do_sample=False) for _ in range(8)]
        assert all(torch.equal(each.result(), expected) for each in made)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())


def test_at_o3_it_generates():
    model = fxamp.convert(model_of("gpt2").eval(), torch.bfloat16, opt_level="O3", example_inputs=(TOKENS,))
    assert model.generate(TOKENS, max_new_tokens=6, do_sample=False).shape == (2, 14)
    with torch.no_grad():
        cache = model(TOKENS, use_cache=True).past_key_values
        assert model(TOKENS[:, -1:], past_key_values=cache).logits.dtype == torch.float32


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_an_encoder_that_generate_calls_by_itself_takes_what_is_float32(opt_level):
    """Spectrograms, as images of Donut, meet weights that are stored low."""
    sizes = {"vocab_size": 64, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, **BART, **HEADS}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**sizes, **tokens, suppress_tokens=None, begin_suppress_tokens=None)
    model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    sounds = torch.randn(2, 8, 32)
    expected = model.eval().generate(sounds, max_new_tokens=4)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level=opt_level).train()
    converted(input_features=sounds, labels=TOKENS[:, :5]).loss.backward()
    assert torch.equal(converted.eval().generate(sounds, max_new_tokens=4), expected)

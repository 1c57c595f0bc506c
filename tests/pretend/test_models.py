"""Models on an accelerator: all of them is there, and they compute what they compute on the CPU."""

from pathlib import Path

import pytest
import torch
from tests.architectures.families import OTHERS, build, text_ids, tiny
from tests.tiny import TINY, tokens
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from hessquant.checkpoint.reader import CheckpointReader
from hessquant.models.library import run_model
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel
from hessquant.place import HOST

CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    # Its matrices are stored transposed.
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=64, vocab_size=97, bos_token_id=1, eos_token_id=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_is_moved_there_gives_the_same_logits(name, accelerator):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval().requires_grad_(False)
    ids = tokens(2, 12)
    expected = model(input_ids=ids, use_cache=False).logits
    logits = model.to(accelerator.device)(input_ids=ids.to(accelerator.device), use_cache=False).logits
    assert logits.device == accelerator.device
    assert torch.equal(logits.cpu(), expected)


def streamed(directory, place):
    with CheckpointReader(Path(directory)) as reader:
        model = StreamedModel(
            ModelSource("tiny", Path(directory), device=place.device), dict(reader.tensors), reader.read
        )
        model.load(list(model.model.state_dict()))
    return model.model


# Some make positions, masks, tables or scales when they are built, and look them up as they run.
@pytest.mark.parametrize("name", ["llama", "codegen", "falcon_h1", "gemma3_text", "gpt_neo", "xglm", "BertForMaskedLM"])
def test_a_streamed_model_is_there_whole_and_gives_the_same_logits(name, place, tmp_path):
    other = next((other for other in OTHERS if other.class_name == name), None)
    config = tiny(other.model_type if other else name)
    build(config, *([name] if other else [])).save_pretrained(tmp_path)
    expected = run_model(streamed(tmp_path, HOST), {"input_ids": text_ids()}).logits
    model = streamed(tmp_path, place)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {place.device}
    logits = run_model(model, {"input_ids": text_ids().to(place.device)}).logits
    assert torch.equal(logits.cpu(), expected)

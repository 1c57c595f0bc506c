"""Models of random weights on disk, whose tokenizer has words."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT = (
    "{% for message in messages %}w3 {{ message['content'] }} w4 {% endfor %}"
    "{% if add_generation_prompt %}w5{% endif %}"
)


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Writes a model whose answers differ from prompt to prompt, with a tokenizer of words w0 to w96."""
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))

    def save(config, name="model", *, seed=0, chat=False, words=None):
        torch.manual_seed(seed)
        config.initializer_range = 0.3
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / name)
        words = words or [f"w{n}" for n in range(97)]
        backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[0]))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0])
        if chat:
            tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


@pytest.fixture
def text(tmp_path):
    """A text of 40 words."""
    ids = torch.randint(97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    path = tmp_path / "test.txt"
    path.write_text(" ".join(f"w{n}" for n in ids))
    return str(path)

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def tokenizer():
    """Words w1 to w89 have ids 1 to 89, any other 0; neither a pad nor an eos token; a context of 8 tokens."""
    words = {"?": 0} | {f"w{n}": n for n in range(1, 90)}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", model_max_length=8)


@pytest.fixture
def words():
    """Text whose ids are those given."""
    return lambda ids: " ".join(f"w{n}" for n in ids)

"""A model so small that all of it is quantized in a second, and tokens for it."""

import torch

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokens(windows=16, length=32, seed=0):
    return torch.randint(0, 97, (windows, length), generator=torch.Generator().manual_seed(seed))

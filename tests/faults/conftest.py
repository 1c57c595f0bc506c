import sys

import pytest
import torch
from tests.faults.harness import Undisturbed, Zygote, decoded, digests
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

# Forks, signals and /proc.
collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A tiny Llama in three shards, with a tokenizer whose words are w0 to w96."""
    folder = tmp_path_factory.mktemp("source") / "model"
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="200KB")
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def zygote(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zygote")
    started = Zygote(folder)
    try:
        started.warm(source, folder / "warm")
        yield started
    finally:
        started.close()


@pytest.fixture(scope="session")
def undisturbed(zygote, source, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    outcome = zygote.run(source, out)
    found = digests(out)
    return Undisturbed(found, decoded(out), outcome.counts, outcome.facts["trace"], outcome.report["run"])


@pytest.fixture
def out(tmp_path):
    """Where a run writes; its parent holds nothing else."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "out"

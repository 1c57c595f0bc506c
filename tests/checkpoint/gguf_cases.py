"""Tiny random models with tiny trained tokenizers, and what the GGUF writer is given for them."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.plans import plan_of, quantize_projections
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hessquant.checkpoint.gguf_reader import verify_gguf
from hessquant.checkpoint.gguf_writer import GgufDraft
from hessquant.checkpoint.output import QuantizedModel
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.records import GridSpec, Plan

TEXT = """The quick brown fox jumps over the lazy dog, and it's 1234 times that we've seen it.
    Then they said: "don't!"  Ünïcödé 日本語 — and 42 more lines of text, the text, the thing that thinks.
    Banana, bandana, ananas: banana bananas and bandanas, an anna nab.\n\n"""
SPECIAL = ("<s>", "</s>", "<unk>")
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}| ", r"\p{N}{1,3}| ")

TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {
    "gpt-2": (None, False),
    "smollm": ("digits", False),
    "qwen2": (QWEN2_SPLIT, False),
    "llama-bpe": (LLAMA3_SPLIT, True),
    "smaug-bpe": (LLAMA3_SPLIT, False),
    "tekken": (TEKKEN_SPLIT, True),
}

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
# Transformers' own reader takes the defaults of what it does not read: these sizes of a head.
GEMMA = {"query_pre_attn_scalar": 256, "sliding_window": 16, "head_dim": 256}
MODELS = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 16},
    "qwen3": {"head_dim": 128},
    "gemma": {},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "num_hidden_layers": 7},
}


def byte_level(split=None, whole_words=False):
    """A byte-level tokenizer, splitting text by a regex or by words."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif split == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[*SPECIAL], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    return json.loads(tokenizer.to_str())


def joined(prefix=True):
    """A tokenizer as one made of a sentencepiece model: every way to make a token is a merge, in the tokens' order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["▁"])
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    made = ["".join(pair) for pair in learnt["merges"]]
    letters = sorted(token for token in learnt["vocab"] if len(token) == 1)
    tokens = [*SPECIAL, *(f"<0x{octet:02X}>" for octet in range(256)), *made, *letters]
    whole = {*made, *letters}
    merges = [
        [token[:cut], token[cut:]]
        for token in made
        for cut in range(1, len(token))
        if token[:cut] in whole and token[cut:] in whole
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in merges],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        if prefix
        else normalizers.Replace(" ", "▁")
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return json.loads(tokenizer.to_str())


def sentencepiece_model(tokenizer, prefix=True, model_type=2, user_defined=()):
    """A sentencepiece model's file with the same tokens: scores fall from token to token."""
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3} | dict.fromkeys(user_defined, 4)

    def varint(number):
        octets = b""
        while number > 127:
            octets += bytes([number & 127 | 128])
            number >>= 7
        return octets + bytes([number])

    def field(number, content):
        return varint(number << 3 | 2) + varint(len(content)) + content

    pieces = b""
    for text, number in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1]):
        kind = kinds.get(text, 6 if text.startswith("<0x") else 1)
        piece = field(1, text.encode()) + b"\x15" + struct.pack("<f", -float(number)) + b"\x18" + varint(kind)
        pieces += field(1, piece)
    return pieces + field(2, b"\x18" + varint(model_type)) + field(3, b"\x18" + varint(int(prefix)))


def save_tokenizer(directory, tokenizer, **settings):
    """Write tokenizer.json and tokenizer_config.json."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        **settings,
    )
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(directory)
    return fast


def save_model(directory, kind, tokenizer, dtype=torch.bfloat16, **changes):
    """A random model of a kind out of MODELS, whose every weight is another."""
    size = max(tokenizer["model"]["vocab"].values()) + 4
    config = CONFIG_MAPPING[kind.partition("-")[0]](**{**SIZES, **MODELS[kind], "vocab_size": size, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    model.to(dtype).save_pretrained(directory)
    return directory


@dataclass
class GgufCase:
    """A source, and everything the writer is given for it."""

    source: Path
    out: Path
    plan: Plan
    quantized: dict[str, QuantizedWeight]

    def write(self):
        with CheckpointReader(self.source) as source:
            draft = GgufDraft(self.out.parent, self._model(source))
            draft.write()
        draft.path.replace(self.out)

    def verify(self):
        with CheckpointReader(self.source) as source:
            return verify_gguf(self.out, self._model(source))

    def _model(self, source):
        output = Config(format="gguf")
        return QuantizedModel(source, self.plan, self.quantized, output, output, (), "0.1.0")


def make_gguf_case(source, out, bits=4, symmetric=True, group_size=32, skip=()):
    targets, untouched, quantized = quantize_projections(source, GridSpec(bits, group_size, symmetric), skip)
    blocks = sorted({name.partition(".self_attn")[0] for name in quantized if "self_attn" in name})
    plan = plan_of(targets, untouched, blocks, group_size, f"/somewhere/else/{source.name}", "")
    return GgufCase(source, out, plan, quantized)

"""What a checkpoint says by our own decoder in plain transformers, and how far rounding alone moves that.

How far is measured, not guessed: by the same decoded weights in plain transformers, in the 16-bit type that a client
computes in, or, for llama.cpp, in float32 with the activations of every quantized weight rounded to 8 bits in blocks of
32, which is how its matrix product begins. A client may be `SLACK` times as far off, since it rounds in another order.
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from hessquant.checkpoint.opening import open_files
from hessquant.checkpoint.unpacked import quantization_of
from hessquant.formats import dialect_of
from hessquant.models.source import resolve
from hessquant.pipeline.evaluating import stream_checkpoint

SLACK = 2.0

PASSAGE = """\
The lighthouse stood on a spit of rock two miles from the harbour, and for most of the winter nobody could reach it.
In the first week of November the keeper counted his stores: flour for ninety days, oil for a hundred and ten, and as
much dried fish as he could bear to eat. He had a brass telescope, a shelf of almanacs and a clock that lost four
minutes a day. Every evening at dusk he climbed the 217 steps, trimmed the wicks, wound the weight that turned the lens,
and wrote the direction of the wind in a ledger. When the supply boat finally came in March, the captain asked him what
he had missed. "Nothing at all," said the keeper. "But I should like to know what time it is."
"""

# What tokenizers differ in: spaces, digits, contractions, scripts, code and the names of special tokens.
TEXTS = (
    PASSAGE,
    " leading and   inner spaces \n\n\tand a tab\r\nand that",
    "It's 1234567 of them, isn't it? They'LL cost $3.50 each (±0.5 %).",
    "Über Größe, naïve café, 日本語のテキスト, русский текст, עברית, 🙂👍🏽.",
    "def f(x):\n    return {'a': x ** 2}  # code\n",
    "<|im_start|>user\nHello<|im_end|>\n",
)


@dataclass(frozen=True)
class Distance:
    """How far log-probabilities, in nats, or the numbers of embeddings are from the reference.

    Attributes:
        mean: Mean of the absolute differences.
        nll: Absolute difference of the means.
    """

    mean: float
    nll: float

    @classmethod
    def between(cls, found: list[float], reference: list[float]) -> "Distance":
        """Compare number by number."""
        differences = [a - b for a, b in zip(found, reference, strict=True)]
        return cls(statistics.fmean(map(abs, differences)), abs(statistics.fmean(differences)))


def _in(dtype: torch.dtype) -> Callable[[nn.Module, set[str]], None]:
    def apply(model: nn.Module, _quantized: set[str]) -> None:
        model.to(dtype)

    return apply


def _with_8_bit_activations(model: nn.Module, quantized: set[str]) -> None:
    modules = dict(model.named_modules())
    # Experts are in one module with others, and stay as they are; less is allowed then.
    for name in quantized & modules.keys():
        modules[name].register_forward_pre_hook(lambda _module, inputs: (_in_8_bit(inputs[0]),))


def _in_8_bit(activations: torch.Tensor) -> torch.Tensor:
    """As llama.cpp's Q8_0 does it: the largest of 32 becomes 127, the scale is stored in float16."""
    blocks = activations.unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / scales.clamp_min(torch.finfo(scales.dtype).tiny)).round()
    return (codes * scales.half().float()).flatten(-2)


ROUNDINGS = {
    "float16": _in(torch.float16),
    "bfloat16": _in(torch.bfloat16),
    "int8": _with_8_bit_activations,
}


@torch.inference_mode()
def measure(checkpoint: Path, texts: list[list[int]], *, embed: bool) -> dict:
    """The reference of a checkpoint, in terms of JSON.

    Args:
        checkpoint: Its directory.
        texts: Token ids of each text.
        embed: Whether it is an encoder, which gives an embedding of every text; any other predicts the tokens of the
            first.

    Returns:
        "values": the embeddings, or log-probabilities of all tokens but the first, by the decoded weights in float32;
        "rounding": the distance that each of `ROUNDINGS` makes; "own": which of them is the checkpoint's.
    """
    computed = _embeddings if embed else _logprobs
    source = resolve(str(checkpoint))
    with open_files(source.directory) as reader:
        described = quantization_of(reader.config)
        quantized = set(dialect_of(described).modules(reader.tensors)) if described is not None else set()
        streamed, _ = stream_checkpoint(source, reader)
        streamed.load(list(streamed.model.state_dict()))
    model = streamed.model
    exact = computed(model, texts)
    rounding = {}
    for kind, apply in ROUNDINGS.items():
        rounded = copy.deepcopy(model)
        apply(rounded, quantized)
        rounding[kind] = asdict(Distance.between(computed(rounded, texts), exact))
    # The coarser type stands in for whatever a server makes of a float32 checkpoint.
    own = "float16" if source.config.dtype == torch.float16 else "bfloat16"
    return {"values": exact, "rounding": rounding, "own": own}


def _embeddings(model: nn.Module, texts: list[list[int]]) -> list[float]:
    """Mean over the tokens of the last layer, of length 1, one text after another."""
    pooled = torch.stack([model(torch.tensor([ids])).last_hidden_state[0].float().mean(0) for ids in texts])
    return nn.functional.normalize(pooled, dim=-1).flatten().tolist()


def _logprobs(model: nn.Module, texts: list[list[int]]) -> list[float]:
    passage = torch.tensor(texts[:1])
    logits = model(passage).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, passage[0, 1:, None])[:, 0].tolist()

"""What is opened in which client: a checkpoint for every feature of every format, and the refusals that are known."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

CLIENTS_OF = {
    "gptq": ("vllm", "transformers", "gptqmodel"),
    "compressed-tensors": ("vllm", "transformers-ct", "transformers-ct-dequantize"),
    "gguf": ("llamacpp",),
    "nvfp4": ("transformers-ct", "transformers-ct-dequantize"),
    "mxfp4": ("transformers-ct", "transformers-ct-dequantize"),
}
ENCODER_CLIENTS_OF = {
    "gptq": ("vllm-pooling", "transformers-encoder"),
    "compressed-tensors": ("vllm-pooling", "transformers-ct-encoder"),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint that is made and opened.

    Attributes:
        format: Its format.
        bits: Bits per code.
        group: Inputs per scale; -1 = all of a row.
        symmetric: Whether zeros are fixed.
        source: What is quantized, by the name in `sources.SOURCES`.
        feature: What else is special, in words; "" = nothing.
        options: Further options of `hessquant quantize`.
        exported_from: Format of the checkpoint that `hessquant export` makes this one of; "" = none, it is quantized.
        maker: Tool that makes it; "given" = it is there.
        settings: The maker's further settings, where that is not Hessquant; "directory" of what is given.
    """

    format: str
    bits: int = 4
    group: int = 64
    symmetric: bool = True
    source: str = "small"
    feature: str = ""
    options: tuple[str, ...] = ()
    exported_from: str = ""
    maker: str = "hessquant"
    settings: dict[str, object] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Short and unique."""
        parts = [
            self.maker if self.maker != "hessquant" else "",
            self.format,
            f"{self.bits}bit",
            "channel" if self.group == -1 else f"g{self.group}",
            "" if self.symmetric else "asymmetric",
            "full" if self.source == "full" else "",
            re.sub(r"\W+", "-", self.feature.lower()).strip("-"),
            f"from-{self.exported_from}" if self.exported_from else "",
        ]
        return "-".join(filter(None, parts))

    @property
    def mixed_bits(self) -> bool:
        """Whether some weights have other bits than most."""
        return any("=bits:" in option for option in self.options)

    @property
    def mixed_groups(self) -> bool:
        """Whether some weights have another group size than most."""
        return any("=group:" in option for option in self.options)

    @property
    def mixed_symmetry(self) -> bool:
        """Whether some weights have a zero per group, and most do not."""
        return any(option.endswith("=asymmetric") for option in self.options)

    @property
    def with_head(self) -> bool:
        """Whether the head is quantized, too."""
        return "lm_head" in self.options

    @property
    def encodes(self) -> bool:
        """Whether it gives embeddings, and not the next token."""
        return self.source == "minilm"

    @property
    def is_mixture(self) -> bool:
        """Whether it is a mixture of experts."""
        return self.source in _MIXTURES.values()

    @property
    def clients(self) -> tuple[str, ...]:
        """Clients that it is opened in."""
        if self.maker == "gptqmodel":
            return ("gptqmodel", "transformers")
        if self.maker == "llmcompressor":
            return ("transformers-ct-dequantize",) if not self.symmetric else ("transformers-ct",)
        if self.encodes:
            return ENCODER_CLIENTS_OF[self.format]
        servers = ("vllm-server",) if self.source == "full" and "vllm" in CLIENTS_OF[self.format] else ()
        # The kernel that it chooses on a CPU does not take these.
        kernel = ("transformers-torch",) if self.format == "gptq" and self.group not in (32, 64, 128) else ()
        return CLIENTS_OF[self.format] + servers + kernel

    @property
    def twin(self) -> "Case":
        """The case whose checkpoint says what this one's weights are.

        A `.gguf` file is judged by the same integers in another format, so that nothing that reads or writes such files
        vouches for itself; an export by what it was made of.
        """
        if self.exported_from:
            return replace(self, format=self.exported_from, exported_from="")
        return replace(self, format="gptq") if self.format == "gguf" else self


_MIXTURES = {"Qwen3-MoE": "qwen3-moe", "OLMoE": "olmoe", "Mixtral": "mixtral"}
_FIRST_IN_16_BIT = ("--exclude", "model.layers.0.*", "--max-unquantized", "1")
_DOWN_8 = ("--override", "mlp.down_proj=bits:8,group:64")
_FIRST_32 = ("--override", "model.layers.0.*=group:32")
_ONLY_DOWN = ("--exclude", "self_attn.*", "--exclude", "mlp.gate_proj", "--exclude", "mlp.up_proj")


def _features(output_format: str) -> list[Case]:
    """What a format has to carry besides its grids."""
    plain = Case(output_format)
    return [
        replace(plain, feature="down_proj in 16 bit", options=("--exclude", "mlp.down_proj")),
        replace(plain, feature="one block in 16 bit", options=("--exclude", "model.layers.1.*")),
        replace(plain, feature="attention in 16 bit", options=("--exclude", "self_attn.*")),
        replace(plain, feature="down_proj in 8 bit", options=_DOWN_8),
        replace(plain, feature="down_proj asymmetric", options=("--override", "mlp.down_proj=asymmetric")),
        replace(plain, feature="one block in groups of 32", options=_FIRST_32),
        replace(plain, feature="with the head", options=("--include", "lm_head")),
        replace(plain, source="small-bfloat16", feature="of a bfloat16 model"),
        replace(plain, source="small-biases", feature="with biases and a head of its own"),
    ]


def _shards(output_format: str) -> Case:
    return Case(output_format, feature="in shards", options=("--shard-size", "20MB"))


def _mixtures(output_format: str) -> list[Case]:
    """Mixtures of experts, and one where servers have to read what is left out."""
    whole = [Case(output_format, source=source, feature=title) for title, source in _MIXTURES.items()]
    return [*whole, replace(whole[0], feature="Qwen3-MoE, one block in 16 bit", options=_FIRST_IN_16_BIT)]


def _encoders(output_format: str) -> list[Case]:
    plain = Case(output_format, source="minilm", feature="all-MiniLM-L6-v2")
    one_block = ("--exclude", "encoder.layer.1.*")
    return [plain, replace(plain, feature="all-MiniLM-L6-v2, one block in 16 bit", options=one_block)]


_GPTQ = [
    Case("gptq", source="full"),
    Case("gptq"),
    *(Case("gptq", group=group) for group in (16, 32, 192, -1)),
    Case("gptq", group=128, feature="down_proj only", options=_ONLY_DOWN),
    Case("gptq", symmetric=False),
    *(Case("gptq", bits=bits, symmetric=symmetric) for bits in (2, 3, 8) for symmetric in (True, False)),
    *_features("gptq"),
    _shards("gptq"),
    Case("gptq", exported_from="compressed-tensors"),
    *_mixtures("gptq"),
    *_encoders("gptq"),
]
_COMPRESSED_TENSORS = [
    Case("compressed-tensors", symmetric=False, source="full"),
    Case("compressed-tensors"),
    Case("compressed-tensors", symmetric=False),
    *(Case("compressed-tensors", group=group) for group in (16, 32, 192, -1)),
    Case("compressed-tensors", group=-1, symmetric=False),
    *(Case("compressed-tensors", bits=8, symmetric=symmetric) for symmetric in (True, False)),
    *_features("compressed-tensors"),
    _shards("compressed-tensors"),
    Case("compressed-tensors", exported_from="gptq"),
    Case("compressed-tensors", symmetric=False, exported_from="gptq"),
    *_mixtures("compressed-tensors"),
    replace(_mixtures("compressed-tensors")[0], symmetric=False),
    *_encoders("compressed-tensors"),
    replace(_encoders("compressed-tensors")[0], symmetric=False),
]
_GGUF = [
    Case("gguf", source="full"),
    Case("gguf"),
    *(Case("gguf", group=group) for group in (32, 192, -1)),
    Case("gguf", symmetric=False),
    *(Case("gguf", bits=bits, symmetric=symmetric) for bits in (2, 3) for symmetric in (True, False)),
    Case("gguf", bits=8),
    *_features("gguf"),
    Case("gguf", exported_from="gptq"),
    Case("gguf", symmetric=False, exported_from="compressed-tensors"),
    Case("gguf", source="small-fused", feature="fused matrices, onto a base", exported_from="gptq"),
    Case("gguf", source="small-mixture", feature="mixture of experts, onto a base", exported_from="gptq"),
]
_FLOATS = [
    case
    for plain in (Case("nvfp4", group=16), Case("mxfp4", group=32))
    for case in (
        plain,
        replace(plain, source="full"),
        replace(plain, feature="down_proj in 16 bit", options=("--exclude", "mlp.down_proj")),
        replace(plain, feature="with the head", options=("--include", "lm_head")),
        replace(plain, source="small-bfloat16", feature="of a bfloat16 model"),
    )
]
# The other way round: what other tools write, by their own loaders and by our decoder.
_FOREIGN = [
    *(Case("gptq", bits=bits, maker="gptqmodel") for bits in (4, 3, 8)),
    Case("gptq", symmetric=False, maker="gptqmodel"),
    Case("gptq", maker="gptqmodel", feature="activation order", settings={"desc_act": True}),
    *(Case("compressed-tensors", bits=bits, maker="llmcompressor") for bits in (4, 8)),
    Case("compressed-tensors", symmetric=False, maker="llmcompressor"),
    Case("compressed-tensors", group=-1, maker="llmcompressor"),
]

CASES = {case.name: case for case in (*_GPTQ, *_COMPRESSED_TENSORS, *_GGUF, *_FLOATS, *_FOREIGN)}


@dataclass(frozen=True)
class Refusal:
    """A refusal that is a client's own limit and no fault of the checkpoint.

    Attributes:
        clients: Start of the clients' names.
        format: Format it is about.
        applies: Which cases it meets.
        words: What its message holds, as a regular expression.
    """

    clients: str
    format: str
    applies: Callable[[Case], bool]
    words: str


_GPTQMODEL_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)

REFUSALS = (
    # Its kernel for them is for CPUs with AMX; with one it should agree.
    *(Refusal("vllm", each, lambda case: case.is_mixture, "No WNA16 MoE backend supports") for each in CLIENTS_OF),
    Refusal("transformers", "gptq", lambda case: case.is_mixture, "random numbers for .*experts"),
    # It looks for the names of transformers' model, and servers for those of published checkpoints.
    Refusal("gptqmodel", "gptq", lambda case: case.source == "mixtral", "Missing required quantized weights"),
    *(
        Refusal(
            client,
            "compressed-tensors",
            lambda case: case.is_mixture and (not case.symmetric or bool(case.options)),
            "automatic conversion of the weights",
        )
        for client in ("transformers-ct", "transformers-ct-dequantize")
    ),
    Refusal("vllm", "gptq", lambda case: case.bits in (2, 3), "Unsupported quantization config"),
    Refusal("vllm", "gptq", lambda case: not case.symmetric or case.mixed_symmetry, "Unsupported quantization config"),
    Refusal("vllm", "gptq", lambda case: case.bits == 8 or case.mixed_bits, "uint8b128"),
    Refusal("vllm", "gptq", lambda case: case.group not in (-1, 32, 64, 128), "group_size"),
    Refusal("vllm", "compressed-tensors", lambda case: case.bits == 8 or case.mixed_bits, "uint8"),
    Refusal("transformers", "gptq", lambda case: case.mixed_bits or case.mixed_groups, "ignore_mismatched_sizes"),
    Refusal("transformers", "gptq", lambda case: case.with_head, "random numbers for .*lm_head"),
    Refusal("transformers", "gptq", lambda case: case.group in (16, -1), "expect qGroupSize to be 32, 64, 128 or 256"),
    Refusal("transformers", "gptq", lambda case: case.group not in _GPTQMODEL_GROUPS, "only supports .* group_size"),
    Refusal("transformers-torch", "gptq", lambda case: case.group not in _GPTQMODEL_GROUPS, "only supports"),
    Refusal("gptqmodel", "gptq", lambda case: case.group not in _GPTQMODEL_GROUPS, "only supports .* group_size"),
    Refusal(
        "transformers-ct",
        "compressed-tensors",
        lambda case: not case.symmetric or case.mixed_symmetry,
        "ignore_mismatched_sizes",
    ),
    # It decodes every weight by one group of the config.
    Refusal(
        "transformers-ct-dequantize",
        "compressed-tensors",
        lambda case: case.mixed_bits or case.mixed_groups or case.mixed_symmetry,
        "automatic conversion of the weights",
    ),
)


def expected_refusal(case: Case, client: str) -> str | None:
    """What the message of a known refusal holds; None where the client has to open the checkpoint."""
    for refusal in REFUSALS:
        named = client.removesuffix("-encoder") == refusal.clients
        named |= refusal.clients == "vllm" and client in ("vllm-server", "vllm-pooling")
        if named and case.format == refusal.format and refusal.applies(case):
            return refusal.words
    return None

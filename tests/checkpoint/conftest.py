import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.plans import plan_of, quantize_projections
from transformers import Qwen2Config, Qwen2ForCausalLM

from hessquant.checkpoint.output import QuantizedModel, begin, completing
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.verify import verify
from hessquant.checkpoint.writer import SafetensorsDraft
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.records import GridSpec, Plan

SIDECARS = {
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}\r\n",
    "modeling_custom.py": b"x = 1\n",
    "LICENSE": b"\xff\xfe not utf-8",
    "processor/vocab.txt": b"a\nb\n",
}
LEFT_BEHIND = ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "model.old.index.json", ".git/HEAD", ".hidden")


@dataclass
class Case:
    """A source, and everything the writer is given for it."""

    source: Path
    out: Path
    plan: Plan
    config: Config
    quantized: dict[str, QuantizedWeight]
    sidecars = SIDECARS
    left_behind = LEFT_BEHIND

    def write(self, shard_bytes=1 << 30):
        """Write and complete the checkpoint; the bytes of its tensors."""
        self.complete(self.write_incomplete(shard_bytes))
        with CheckpointReader(self.out) as written:
            return sum(info.bytes for info in written.tensors.values())

    def write_incomplete(self, shard_bytes=1 << 30):
        config = replace(self.config, shard_bytes=shard_bytes)
        with CheckpointReader(self.source) as reader:
            draft = SafetensorsDraft(self.out, self.model(reader, config))
            begin(self.out, "a run")
            draft.write()
            return draft

    def complete(self, draft):
        with completing(self.out):
            draft.reveal()

    def model(self, reader, config):
        return QuantizedModel(reader, self.plan, self.quantized, config, config, (), "0.1.0")

    def verify(self):
        """Verify what is in `out` by the config that is there."""
        with CheckpointReader(self.source) as source:
            config = json.loads((self.out / "config.json").read_text())
            return verify(self.out, config, self.model(source, self.config))


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    model.to(torch.bfloat16).save_pretrained(directory)
    for name, content in SIDECARS.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    for name in LEFT_BEHIND:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"left behind")
    return directory


def make_case(source, out, config=None):
    config = config or Config(group_size=32)
    spec = GridSpec(bits=config.bits, symmetric=config.symmetric, group_size=config.group_size)
    targets, untouched, quantized = quantize_projections(source, spec)
    blocks = ("model.layers.0", "model.layers.1")
    plan = plan_of(targets, untouched, blocks, config.group_size, "qwen2", "Qwen2ForCausalLM")
    return Case(source, out, plan, config, quantized)


@pytest.fixture
def case(qwen2, tmp_path):
    return make_case(qwen2, tmp_path / "out")


@pytest.fixture
def make_asymmetric_case(qwen2, tmp_path):
    return lambda: make_case(qwen2, tmp_path / "out", Config(group_size=32, symmetric=False))


@pytest.fixture
def sharded(tmp_path):
    """A sound source of two shards, to be damaged."""
    directory = tmp_path / "sharded"
    directory.mkdir()
    weight_map = {}
    for shard, names in {"a.safetensors": ("x", "y"), "b.safetensors": ("z",)}.items():
        tensors = {name: torch.full((8, 8), float(ord(name))) for name in names}
        save_file(tensors, directory / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory

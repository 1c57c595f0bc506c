"""Whole runs on a device, for `gpu.py`: one block of a real model's shape, random weights, quantized twice."""

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import hessquant
from gpu_meter import Meter
from hessquant.records import Plan
from hessquant.results import LayerRecord, RunReport
from planning import as_published

REPORTS = ("hessquant-report.json", "hessquant-report.html")
"""Files that say how long it took, and so differ from run to run."""


@dataclass(frozen=True)
class Job:
    """A model and what it is calibrated on: windows of random token ids."""

    name: str
    config: PreTrainedConfig
    windows: int
    length: int


def jobs(small: bool) -> list[Job]:
    """The blocks of Llama-3-8B and of Qwen3-30B-A3B, with a vocabulary of 512; or both, a hundredth as wide."""
    wide = {"vocab_size": 512, "num_hidden_layers": 1, "tie_word_embeddings": False, "bos_token_id": 1}
    wide |= {"eos_token_id": 2, "pad_token_id": None, "max_position_embeddings": 8192}
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    qwen = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
    if small:
        narrow = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        llama, qwen = narrow, narrow
        experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    windows, length = (4, 32) if small else (16, 2048)
    dense = LlamaConfig(**wide, **llama, architectures=["LlamaForCausalLM"])
    mixture = Qwen3MoeConfig(**wide, **qwen, **experts, norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"])
    return [Job("Llama-3-8B", dense, windows, length), Job("Qwen3-30B-A3B", mixture, windows, length)]


def write_model(directory: Path, config: PreTrainedConfig) -> None:
    """A checkpoint in bfloat16 of normal weights, and of ones where a weight is a vector."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in state.items():
        for title, shape in as_published(name, tuple(tensor.shape)):
            # Hidden states of a usual size: an embedding is not small as the weights are.
            spread = 1.0 if shape[0] == config.vocab_size else 0.02
            ones = torch.ones(shape)
            values = ones if len(shape) == 1 else ones.normal_(0, spread, generator=generator)
            tensors[title] = values.to(torch.bfloat16)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config.dtype = "bfloat16"
    config.save_pretrained(directory)


class Clock:
    """Implements `hessquant.results.Progress`: seconds of each stage, and the plan."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.made: Plan | None = None
        self._stage, self._since = "plan", time.perf_counter()

    def plan(self, plan: Plan) -> None:
        self.made = plan

    def stage(self, name: str, steps: int) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = name, now

    def advance(self, detail: str) -> None: ...

    def layer(self, record: LayerRecord) -> None: ...


def operations(report: RunReport) -> dict[str, tuple[str, float]]:
    """By stage, the dtype that it counts in and its operations: the linear layers' forward pass, and the solver's.

    Attention's own products, the router and the embedding are left out.
    """
    shared = {layer.shares_hessian_with: layer for layer in report.layers}.values()
    products = sum(layer.rows * layer.columns**2 for layer in report.layers)
    passes = report.forwards_per_block
    forward = passes * sum(2 * layer.tokens * layer.rows * layer.columns for layer in report.layers)
    return {
        "forward": ("bfloat16", float(forward)),
        "Hessians": ("float32", float(sum(layer.tokens * layer.columns**2 for layer in shared))),
        "factors": ("float64", sum(layer.columns**3 / 3 for layer in shared)),
        "sweeps and losses": ("float32", float(4 * products)),
    }


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in REPORTS)
    found = {}
    for path in files:
        with path.open("rb") as file:
            found[str(path.relative_to(directory))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def run(job: Job, model: Path, out: Path, meter: Meter) -> tuple[dict[str, Any], RunReport]:
    """Quantize once: what it took, by stage, and the report."""
    ids = torch.randint(3, job.config.vocab_size, (job.windows, job.length), generator=torch.Generator().manual_seed(1))
    settings = hessquant.Config(device=str(meter.device), num_windows=job.windows, window_length=job.length)
    clock = Clock()
    meter.begin_peak()
    wall, report = meter.timed(lambda: hessquant.quantize(str(model), out, settings, calibration=[ids], progress=clock))
    clock.stage("", 0)
    assert clock.made is not None
    estimates = {
        field.name: getattr(clock.made, field.name)
        for field in fields(clock.made)
        if field.name.endswith("memory_bytes")
    }
    told = {
        "seconds": wall,
        "seconds_by_stage": clock.seconds,
        "seconds_of_solutions": sum(layer.seconds for layer in report.layers),
        "peak_bytes": meter.peak(),
        "peak_bytes_of_the_process": report.peak_memory_bytes,
        "planned": estimates,
        "place": clock.made.place,
        "capture": report.capture,
        "degraded": len(report.degraded),
        "loss_over_rtn": sum(layer.loss for layer in report.layers) / sum(layer.rtn_loss for layer in report.layers),
    }
    return told, report


def twice(job: Job, meter: Meter, rates: Mapping[str, float], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """One model quantized twice: the first run also compiles and reads what is not in the system's cache."""
    model = folder / "model"
    write_model(model, job.config)
    first, _ = run(job, model, folder / "first", meter)
    again, report = run(job, model, folder / "again", meter)
    one, other = digests(folder / "first"), digests(folder / "again")
    unlike = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    faults = [f"{job.name}: two runs wrote different bytes: {', '.join(unlike)}"] if unlike else []
    if not len(report.layers) == report.verified_tensors > 0:
        faults.append(f"{job.name}: {report.verified_tensors} of {len(report.layers)} weights were verified")
    if not again["loss_over_rtn"] < 1:
        faults.append(f"{job.name}: the loss is {again['loss_over_rtn']:.4g} of round-to-nearest's")
    counted = operations(report)
    told = {
        "model": job.name,
        "weights": len(report.layers),
        "windows": job.windows,
        "window_length": job.length,
        "first": first,
        "again": again,
        "operations": {name: count for name, (_, count) in counted.items()},
        "limit_seconds": {name: count / rates[dtype] for name, (dtype, count) in counted.items()},
        "files": len(one),
        "unlike_files": unlike,
    }
    return told, faults


def measure(meter: Meter, rates: Mapping[str, float], small: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """All models: a record of each, and a sentence per thing that is not as it must be."""
    told, faults = [], []
    for job in jobs(small):
        with TemporaryDirectory() as name:
            record, found = twice(job, meter, rates, Path(name, "work"))
            told.append(record)
            faults += found
            shutil.rmtree(Path(name, "work"))
    return told, faults

"""Made-up records for the tests of the command line and the report, and a device to run on."""

import math
import os
from dataclasses import asdict

import pytest
from tests.device import INTERPRETED
from tests.pretend.device import installed

from hessquant.config import Config
from hessquant.measures import Continuation, TaskScore, WindowMeasures
from hessquant.records import GridSpec, Location, Plan, ServerVerdict, Target, TensorInfo, Untouched
from hessquant.results import (
    CalibrationRecord,
    Comparison,
    Evaluation,
    ExportReport,
    InspectedWeight,
    Inspection,
    LayerRecord,
    RunReport,
)

# Before anything imports Triton: its kernels run on the CPU then.
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

_HIDDEN, _INTERMEDIATE, _BLOCKS = 576, 1536, 30
_SHAPES = {
    "self_attn.q_proj": (576, _HIDDEN),
    "self_attn.k_proj": (192, _HIDDEN),
    "self_attn.v_proj": (192, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, 576),
    "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
}


def _targets():
    return tuple(
        Target(
            name=f"model.layers.{block}.{name}.weight",
            locations=(Location(f"model.layers.{block}.{name}.weight", rows),),
            block=block,
            rows=rows,
            columns=columns,
            grid=GridSpec(4, 64),
            transposed=False,
            shares_input_with=f"model.layers.{block}.{name}.weight",
        )
        for block in range(_BLOCKS)
        for name, (rows, columns) in _SHAPES.items()
    )


def _layer(target, index):
    rtn_loss = target.columns * (1 + 0.3 * math.sin(index)) * 1e-3
    loss = rtn_loss * (0.35 + 0.05 * (index % 7) + 0.08 * math.cos(index / 9))
    raised = index == 17
    return LayerRecord(
        name=target.name,
        rows=target.rows,
        columns=target.columns,
        bits=target.grid.bits,
        group_size=target.grid.group_size,
        tokens=65_536,
        shares_hessian_with=target.name,
        pooled_share=0.0,
        method="rtn" if index == 20 else "gptq",
        loss=rtn_loss if index == 20 else loss,
        rtn_loss=rtn_loss,
        output_energy=rtn_loss * 10 ** (1 + index % 7 / 3),
        expected_loss=loss * 0.97,
        floor=loss * (0.6 + 0.04 * (index % 7)),
        damping=0.01,
        damping_used=0.1 if raised else 0.01,
        factorizations=2 if raised else 1,
        dead_columns=3 if index == 40 else 0,
        fallback_rows=index % 5 if index % 11 == 0 else 0,
        zero_groups=0,
        tiny_groups=0,
        seconds=0.2 + 0.001 * index,
    )


@pytest.fixture
def accelerator():
    """The pretend device of `tests/pretend`."""
    with installed().use() as device:
        yield device


@pytest.fixture
def plan():
    return Plan(
        source="org/small-model",
        architecture="LlamaForCausalLM",
        blocks=tuple(f"model.layers.{block}" for block in range(_BLOCKS)),
        whole="",
        returns_tuple=(False,) * _BLOCKS,
        hidden_size=_HIDDEN,
        targets=_targets(),
        untouched=(
            Untouched("model.embed_tokens.weight", (49152, _HIDDEN), "BF16", 56_623_104, "embedding"),
            *(
                Untouched(f"model.layers.{block}.input_layernorm.weight", (_HIDDEN,), "BF16", 1152, "norm")
                for block in range(_BLOCKS)
            ),
        ),
        unties_head=False,
        group_size=64,
        bits_per_weight=4.3125,
        unquantized_share=0.2107,
        unquantized_matrices=0.0004,
        source_bytes=269_060_552,
        output_bytes=114_000_000,
        memory_bytes=1_234_567_890,
        tensor_parallel=2,
        servers=(
            ServerVerdict("vLLM 0.32 (CPU)", "yes", "4-bit symmetric, group 64", "measured"),
            ServerVerdict("transformers 5.24", "yes", "needs gptqmodel and optimum, and bfloat16", "measured"),
            ServerVerdict("SGLang", "unknown", "no CPU wheel to try it with", "not run"),
            ServerVerdict("llama.cpp", "no", "does not read the GPTQ format; export to GGUF", "documented"),
        ),
    )


@pytest.fixture
def export_report(plan):
    return ExportReport("0.1.0", plan, "gptq_v2", "compressed-tensors", 210, 114_000_000, 12.5)


@pytest.fixture
def run_report(plan):
    """A run where layer 17 needed more damping and layer 20 was rounded to nearest."""
    layers = tuple(_layer(target, index) for index, target in enumerate(plan.targets))
    return RunReport(
        version="0.1.0",
        run="cd" * 32,
        settings=asdict(Config(group_size=64)),
        plan=plan,
        calibration=CalibrationRecord("valid.txt", 128, 65_536, 287_645, "ab" * 32),
        layers=layers,
        capture="once",
        forwards_per_block=1.0,
        resumed_blocks=0,
        mapped_activation_bytes=0,
        degraded=(
            f"{layers[17].name}: damping raised from 0.01 to 0.1",
            f"{layers[20].name}: every row rounded to nearest",
        ),
        seconds=201.4,
        cpu_seconds=391.7,
        peak_memory_bytes=1_500_000_000,
        output_bytes=114_000_000,
        verified_tensors=210,
        environment={"torch": "2.13.0", "transformers": "5.24.0", "threads": "2"},
    )


@pytest.fixture
def evaluation():
    return Evaluation(
        model="out/small",
        text="test.txt",
        perplexity=28.4512,
        nll=3.34819,
        tokens=20_440,
        windows=40,
        window_length=512,
        comparison=Comparison(
            base="org/small-model",
            base_perplexity=25.6031,
            kl_divergence=0.10532,
            top1_agreement=0.8314,
            base_perplexity_error=0.5317,
            kl_error=0.00211,
            top1_error=0.0032,
            perplexity_ratio=1.1112,
            ratio_error=0.0041,
        ),
        perplexity_error=0.6126,
        nll_error=0.02153,
        per_window=(WindowMeasures(511, 3.3, 3.2, 0.1, 0.83),) * 40,
        continuations=(
            Continuation("Once upon", " a time, it rained.", 6, " a time, there was", 5, 4),
            Continuation("2 + 2 =", " 4", 2, " 4", 2, 2),
        ),
        tasks=(
            TaskScore("capitals", "acc", "none", 0, 120, True, 0.625, 0.0443, 0.65, 0.0437),
            TaskScore("capitals", "perplexity", "none", 0, 120, False, 11.5, None, 10.25, None),
        ),
    )


@pytest.fixture
def inspection():
    return Inspection(
        directory="small",
        format="gptq",
        weights=tuple(
            InspectedWeight(f"model.layers.{block}.mlp.up_proj", 1536, 576, GridSpec(4, 64), 500_000)
            for block in range(30)
        ),
        untouched=(TensorInfo("model.embed_tokens.weight", (49152, 576), "BF16", 56_623_104, "model.safetensors"),),
        bits_per_weight=4.3125,
        total_bytes=71_623_104,
        faults=(),
    )

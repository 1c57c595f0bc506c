"""Calibration tokens per expert: foretold by the plan, and seen by the run after its first block of experts."""

import re
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from transformers import MixtralConfig

import hessquant
from hessquant.config import Config
from hessquant.planning.plan import make_plan
from hessquant.records import ExpertLoad
from hessquant.report.figures import load_sentences
from hessquant.report.json_report import from_json, to_json
from hessquant.report.progress import LineProgress

MIXTURE = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 97, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 256,
}  # fmt: skip


def test_a_plan_foretells_the_tokens_of_an_expert(saved):
    plan = make_plan(*saved(MixtralConfig(**MIXTURE)), Config(num_windows=3, window_length=100))
    assert plan.expert_load == ExpertLoad(
        module="model.layers.*.mlp.experts",
        experts=8,
        chosen=2,
        tokens=3 * 100 * 2 // 8,
        enough=96 // 2,
        windows=4,  # 4 x 100 x 2 / 8 is the first to reach twice 48
    )


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (MIXTURE, {"experts": "all"}),
        (MIXTURE, {"exclude": ("experts.*",)}),
    ],
)
def test_nothing_is_foretold_where_every_expert_sees_all_or_none_is_quantized(saved, config, settings):
    plan = make_plan(*saved(MixtralConfig(**config)), Config(max_unquantized=1.0, **settings))
    assert plan.expert_load is None


@pytest.mark.parametrize(("tokens", "said"), [(200, ""), (150, "chosen less often"), (99, "most will have fewer")])
def test_too_few_are_said_with_what_to_change(tokens, said):
    load = ExpertLoad("m.*.experts", 64, 8, tokens, enough=100, windows=77)
    sentences = load_sentences(load)
    assert [said in sentence and "--num-windows 77" in sentence for sentence in sentences] == [True] * bool(said)


def test_a_report_keeps_it(run_report):
    load = ExpertLoad("m.*.experts", 64, 8, 10, 100, 77)
    report = replace(run_report, plan=replace(run_report.plan, expert_load=load))
    assert from_json(to_json(report)).plan.expert_load == load
    assert from_json(to_json(run_report)).plan.expert_load is None


@pytest.mark.parametrize(("length", "starves"), [(8, True), (256, False)])
def test_a_run_says_after_the_first_block_that_most_experts_starve(saved, tmp_path, length, starves):
    source, _ = saved(MixtralConfig(**MIXTURE))
    console = Console(file=StringIO(), width=40)
    ids = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(0)).tolist()
    with LineProgress(console) as progress:
        hessquant.quantize(
            str(source.directory), tmp_path / "out", Config(group_size=32), calibration=ids, progress=progress
        )
    lines = console.file.getvalue().splitlines()
    said = [line for line in lines if "fitted mostly to what all experts see" in line]
    assert len(said) == starves
    if starves:
        assert re.match(r"model\.layers\.0\.\S*experts: \d+ of the 24 matrices of experts", said[0])
        assert lines.index(said[0]) < next(i for i, line in enumerate(lines) if line.startswith("quantize: done"))

"""Text that says the same again and again, by its counts and by what it makes of a model's Hessians."""

import json
import random
import re
from dataclasses import replace

import pytest
import torch
from tests.tiny import TINY, tokens
from transformers import AutoModelForCausalLM, LlamaConfig

import hessquant
from hessquant.calibration.model_inputs import model_inputs
from hessquant.calibration.record import calibration_record
from hessquant.records import TokenWindow
from hessquant.report.degraded import text_degradations
from hessquant.report.json_report import from_json, to_json


def variety(windows):
    record = calibration_record("t", windows, 0)
    return record.distinct_windows, record.distinct_tokens, record.passages, record.distinct_passages


def test_counts_are_of_windows_tokens_and_runs_of_eight():
    period = TokenWindow(tuple(range(10)) * 3)  # 23 runs, 10 of them different
    windows = [period, period, TokenWindow((1, 2, 3)), TokenWindow((1, 2), (3,))]
    assert variety(windows) == (3, 10, 23 + 23 + 1 + 1 + 1, 10 + 1 + 1 + 1)
    samples = [model_inputs({"input_ids": [[5, 6]], "pixel_values": [[value]]}, "s") for value in (0.5, 0.5, 0.7)]
    assert variety(samples) == (2, 2, 3, 1)
    assert variety([model_inputs({"pixel_values": [[0.5]]}, "s")]) == (1, 0, 0, 0)


def record_of(columns, rank, tokens, run_report):
    return replace(run_report.layers[0], columns=columns, effective_rank=rank, tokens=tokens)


def told(windows, records):
    return list(text_degradations(records, calibration_record("t", [TokenWindow(tuple(w)) for w in windows], 0)))


def varied(windows, length, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(500) for _ in range(length)] for _ in range(windows)]


@pytest.mark.parametrize(
    ("windows", "rank", "sign"),
    [
        (varied(16, 64), 600, None),
        (varied(1, 64), 60, None),  # little of it, but all different
        ([list(range(400)) * 2], 600, None),  # said twice
        (varied(1, 64) * 16, 600, "only 1 of its 16 windows differ"),
        ([*varied(8, 64), *varied(8, 64)], 600, None),
        ([list(range(11)) * 90], 600, "only 11 of its 983 runs of 8 tokens differ, with 11 different tokens"),
        # Ten times over: too little for wide weights.
        ([list(range(100)) * 8], 600, "only 100 of its 793 runs of 8 tokens differ"),
        (varied(16, 64), 200, "1 of 1 Hessians have less than 50% .*effective rank"),
    ],
)
def test_a_text_is_held_against_what_so_many_tokens_could_say(windows, rank, sign, run_report):
    record = record_of(600, rank, sum(map(len, windows)), run_report)
    sentences = told(windows, [record])
    if sign is None:
        assert sentences == []
    else:
        (sentence,) = sentences
        assert "too little variety" in sentence
        assert re.search(sign, sentence)


def test_half_of_the_hessians_decide_and_each_counts_once(run_report):
    def layers(*ranks):
        return [
            replace(record_of(600, rank, 5000, run_report), name=f"{index}", shares_hessian_with=leader)
            for index, (leader, rank) in enumerate(ranks)
        ]

    assert told(varied(8, 64), layers(("a", 10), ("a", 10), ("a", 10), ("b", 600), ("c", 600))) == []
    assert "2 of 3" in told(varied(8, 64), layers(("a", 10), ("b", 10), ("c", 600)))[0]
    unseen = [replace(layer, tokens=0) for layer in layers(("a", 0), ("b", 0))]
    assert told(varied(8, 64), unseen) == []


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_run_says_how_varied_its_text_was(model, tmp_path):
    config = hessquant.Config(group_size=32, scale_search=False)
    report = hessquant.quantize(model, tmp_path / "fine", config, calibration=[tokens()])
    assert report.degraded == ()
    assert (report.calibration.distinct_windows, report.calibration.distinct_tokens) == (16, 97)
    assert all(0 < layer.effective_rank <= layer.columns for layer in report.layers)
    sentence = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
    ids = (sentence * 60)[: 16 * 32]
    rows = [ids[start : start + 32] for start in range(0, len(ids), 32)]
    report = hessquant.quantize(model, tmp_path / "same", config, calibration=rows)
    assert "too little variety" in report.degraded[0]
    page = (tmp_path / "same" / "hessquant-report.html").read_text()
    assert page.count("too little variety") == 1
    assert "11 different tokens" in page


def test_reports_without_the_counts_are_still_read(run_report):
    written = json.loads(to_json(run_report))
    for name in ("distinct_windows", "distinct_tokens", "passages", "distinct_passages"):
        del written["calibration"][name]
    for layer in written["layers"]:
        del layer["effective_rank"]
    del written["plan"]["window_length"], written["plan"]["context"]
    assert from_json(json.dumps(written)).layers == run_report.layers
    del written["version"]
    with pytest.raises(ValueError, match="not a run report"):
        from_json(json.dumps(written))

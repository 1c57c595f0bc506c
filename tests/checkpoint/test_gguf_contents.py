import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from gguf import LlamaFileType
from tests.checkpoint import gguf_cases as cases

from hessquant.checkpoint.gguf_contents import contents_of, file_type
from hessquant.checkpoint.gguf_writer import GgufDraft
from hessquant.errors import PlanError
from hessquant.records import GridSpec, Untouched

EMBEDDING, QUERY = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tokenizer():
    return cases.byte_level()


@pytest.fixture(scope="module")
def source(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("llama")
    cases.save_model(directory, "llama", tokenizer)
    cases.save_tokenizer(directory, tokenizer)
    return directory


@pytest.fixture
def config(source):
    return json.loads((source / "config.json").read_text())


@pytest.fixture
def plan(source, tmp_path):
    return cases.make_gguf_case(source, tmp_path / "m.gguf").plan


def fault_of(config, directory, plan):
    return GgufDraft.fault(SimpleNamespace(config=config, directory=directory), plan)


def change_target(plan, which, **changes):
    targets = tuple(replace(target, **changes) if target.name == which else target for target in plan.targets)
    return replace(plan, targets=targets)


def change_untouched(plan, which, **changes):
    untouched = tuple(replace(tensor, **changes) if tensor.name == which else tensor for tensor in plan.untouched)
    return replace(plan, untouched=untouched)


def test_a_model_with_a_form_has_no_fault(config, source, plan):
    assert fault_of(config, source, plan) is None


def test_blocks_follow_each_other(config, plan):
    first = [target for target in plan.targets if target.block == 0]
    more = [replace(t, name=t.name.replace(".0.", f".{number}.")) for t in first for number in range(2, 12)]
    norms = [tensor for tensor in plan.untouched if ".0." in tensor.name]
    more_norms = [replace(t, name=t.name.replace(".0.", f".{number}.")) for t in norms for number in range(2, 12)]
    plan = replace(plan, targets=(*more, *plan.targets), untouched=(*plan.untouched, *more_norms))
    names = [entry.place.name for entry in contents_of({**config, "num_hidden_layers": 12}, plan)]
    blocks = [int(name.split(".")[1]) for name in names if name.startswith("blk.")]
    assert blocks == sorted(blocks)
    assert max(blocks) == 11
    assert len(set(names)) == len(names) == len(plan.targets) + len(plan.untouched)


def test_factors_of_the_rotary_embedding_are_a_tensor(config, source, plan):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    config["rope_parameters"] = {**llama3, "original_max_position_embeddings": 64}
    first = contents_of(config, plan)[0]
    assert (first.source, first.place.name, first.shape, first.bytes) == (None, "rope_freqs.weight", (16,), 64)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt2"}, "models of type 'gpt2'"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "type 'dynamic'"),
        ({"intermediate_size": None}, "does not say intermediate_size"),
        ({"vocab_size": 5}, "a token of id"),
    ],
)
def test_a_config_without_a_form_is_told_before_any_work(config, source, plan, changes, complaint):
    assert complaint in fault_of({**config, **changes}, source, plan)


def test_a_tokenizer_without_a_form_is_told_before_any_work(config, plan, tmp_path, tokenizer):
    assert "neither tokenizer.json" in fault_of(config, tmp_path, plan)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**tokenizer, "pre_tokenizer": {"type": "Whitespace"}}))
    assert "Whitespace" in fault_of(config, tmp_path, plan)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda plan: change_target(plan, QUERY, transposed=True), "q_proj.weight: weights that are stored transposed"),
        (lambda plan: change_target(plan, QUERY, grid=GridSpec(4, 16)), "q_proj.weight: group size 16"),
        (lambda plan: change_target(plan, QUERY, rows=64), "has 64 rows, but the config says 4 heads of 32"),
        (lambda plan: change_untouched(plan, EMBEDDING, shape=(9, 64)), "has 9 rows, but the config says"),
        (lambda plan: change_untouched(plan, EMBEDDING, dtype="F64"), "embed_tokens.weight: F64"),
        (lambda plan: change_untouched(plan, EMBEDDING, shape=(9, 8, 8)), "embed_tokens.weight: BF16 [9, 8, 8]"),
        (lambda plan: change_untouched(plan, EMBEDDING, name="model.extra"), "model.extra: llama models have no such"),
    ],
)
def test_a_plan_without_a_form_is_told_before_any_work(config, source, plan, change, complaint):
    assert complaint in fault_of(config, source, change(plan))
    with pytest.raises(PlanError):
        contents_of(config, change(plan))


def test_a_tied_head_cannot_be_a_target(config, plan):
    config["tie_word_embeddings"] = True
    head = replace(plan.targets[0], name="lm_head.weight")
    untouched = tuple(tensor for tensor in plan.untouched if tensor.name != "lm_head.weight")
    with pytest.raises(PlanError, match=r"lm_head\.weight: llama\.cpp takes the embedding"):
        contents_of(config, replace(plan, targets=(*plan.targets, head), untouched=untouched))
    assert not any(entry.source == "lm_head.weight" for entry in contents_of(config, plan))


def test_a_head_that_is_untied_is_written(config, plan):
    rows = next(tensor.shape[0] for tensor in plan.untouched if tensor.name == EMBEDDING)
    head = replace(plan.targets[0], name="lm_head.weight", rows=rows, columns=64)
    untouched = tuple(tensor for tensor in plan.untouched if tensor.name != "lm_head.weight")
    plan = replace(plan, targets=(*plan.targets, head), untouched=untouched, unties_head=True)
    places = {entry.source: entry.place.name for entry in contents_of({**config, "tie_word_embeddings": True}, plan)}
    assert places["lm_head.weight"] == "output.weight"


def test_an_untied_head_can_be_a_target(config, plan):
    rows = next(tensor.shape[0] for tensor in plan.untouched if tensor.name == "lm_head.weight")
    head = replace(plan.targets[0], name="lm_head.weight", rows=rows, columns=64)
    untouched = tuple(tensor for tensor in plan.untouched if tensor.name != "lm_head.weight")
    entries = contents_of(config, replace(plan, targets=(*plan.targets, head), untouched=untouched))
    assert {entry.place.name: entry.kind.name for entry in entries}["output.weight"] == "Q4_0"


def test_the_file_type_is_what_most_of_the_blocks_are(config, plan):
    assert file_type(contents_of(config, plan)) == LlamaFileType.MOSTLY_Q4_0
    eight = tuple(replace(t, grid=replace(t.grid, bits=8)) if "self_attn" in t.name else t for t in plan.targets)
    mixed = replace(plan, targets=eight)
    assert file_type(contents_of(config, mixed)) == LlamaFileType.MOSTLY_Q8_0
    plain = [Untouched(t.name, (t.rows, t.columns), "F16", 0, "") for t in plan.targets]
    untouched = replace(plan, targets=(), untouched=(*plan.untouched, *plain))
    assert file_type(contents_of(config, untouched)) == LlamaFileType.MOSTLY_F16

"""A source that cannot be read: the error names file and tensor, and the run goes on when it can."""

import json

import pytest
from tests.faults.harness import BLOCKS, finished_blocks, looks_complete

# Every tensor is read by the audit; one of a block when the block is loaded, and again when it is copied and verified,
# if it is not quantized.
WEIGHT, NORM = "model.layers.2.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"
READS = [
    ("audit", WEIGHT, 1, "EIO", 0),
    ("audit", NORM, 1, "safetensors", 0),
    ("prelude", "model.embed_tokens.weight", 2, "EIO", 0),
    ("block", WEIGHT, 2, "EIO", 2),
    ("block", WEIGHT, 2, "safetensors", 2),
    ("copy", NORM, 3, "EIO", BLOCKS),
    ("copy", "lm_head.weight", 2, "safetensors", BLOCKS),
    ("verification", NORM, 4, "EIO", BLOCKS),
]


def file_of(directory, tensor):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][tensor]


@pytest.mark.parametrize(("stage", "tensor", "nth", "does", "kept"), READS)
def test_a_read_that_fails_names_file_and_tensor(stage, tensor, nth, does, kept, zygote, source, undisturbed, out):
    fault = {"point": f"source-read {tensor}", "nth": nth, "does": does}
    failed = zygote.run(source, out, fault=fault)
    assert failed.facts["fired"]
    assert failed.error[0] == ("VerificationError" if stage == "verification" else "SourceError"), failed.facts
    assert file_of(source, tensor) in failed.message
    assert tensor in failed.message
    assert not looks_complete(out)
    assert finished_blocks(out.with_name("out.run")) == kept
    again = zygote.run(source, out)
    assert again.report["resumed_blocks"] == kept
    undisturbed.assert_reached_by(out)


def test_a_block_that_cannot_be_read_back_is_named(zygote, source, undisturbed, out):
    tensor = "model.layers.1.mlp.up_proj.weight.codes"
    failed = zygote.run(source, out, fault={"point": f"stored-read {tensor}", "nth": 1, "does": "EIO"})
    assert failed.error[0] == "CheckpointError", failed.facts.get("traceback")
    assert "block-00001.safetensors" in failed.message
    assert tensor.removesuffix(".codes") in failed.message
    assert not looks_complete(out)
    assert zygote.run(source, out).report["resumed_blocks"] == BLOCKS
    undisturbed.assert_reached_by(out)


def test_an_output_that_cannot_be_read_back_does_not_pass_verification(zygote, source, undisturbed, out):
    tensor = "model.layers.3.mlp.down_proj.qweight"
    failed = zygote.run(source, out, fault={"point": f"written-read {tensor}", "nth": 1, "does": "EIO"})
    assert failed.error[0] == "VerificationError", failed.facts.get("traceback")
    assert file_of(out, tensor) in failed.message
    assert tensor in failed.message
    assert not looks_complete(out)
    assert zygote.run(source, out).report["resumed_blocks"] == BLOCKS
    undisturbed.assert_reached_by(out)

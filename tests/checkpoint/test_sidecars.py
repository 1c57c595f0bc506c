"""What goes with a checkpoint: what its user needs, and nothing of another form, another tool or another machine."""

import json

import pytest

from hessquant.checkpoint.sidecars import copy_sidecars, portable

NEEDED = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "qwen.tiktoken", "spiece.model",
    "special_tokens_map.json", "added_tokens.json", "generation_config.json", "preprocessor_config.json",
    "processor_config.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja",
    "modeling_x.py", "configuration_x.py", "LICENSE", "LICENSE.txt", "NOTICE", "README.md", "figures/a.png",
    "modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "scaler.json", "params.json",
)  # fmt: skip
LEFT = (
    "pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors.index.json", "consolidated.00.pth",
    "consolidated.safetensors", "optimizer.pt", "scheduler.pt", "training_args.bin", "model.ckpt", "tf_model.h5",
    "flax_model.msgpack", "rust_model.ot", "model.onnx", "model.onnx_data", "model.gguf", "m.npz", "state.pkl",
    "m.nemo", "m.mlmodel", "m.tflite", "PYTORCH_MODEL.BIN", "model.ckpt-1.data-00000-of-00001", "model.ckpt-1.index",
    "original/params.json", "original/consolidated.00.pth", "original/tokenizer.model", "onnx/config.json",
    "openvino/openvino_model.xml", "openvino/openvino_model.bin", "coreml/m.mlpackage/Manifest.json",
    "checkpoint-500/config.json", "checkpoint-500/trainer_state.json", "trainer_state.json",
    "runs/events.out.tfevents.1", "__pycache__/modeling_x.cpython-312.pyc", ".git/config",
    ".cache/huggingface/download/a.json", ".gitattributes",
    "quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json", "recipe.yaml",
    "quant_log.csv", "kv_cache_scales.json", "amax.json", "model_amax.json", "act_scales.json", "quant_strategy.json",
    "quant_model_description.json",
)  # fmt: skip


@pytest.fixture
def copied(tmp_path):
    """Copies the files with these contents; what is there then."""

    def run(contents):
        for name, content in contents.items():
            path = tmp_path / "source" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        copy_sidecars(tmp_path / "source", tmp_path / "out", ())
        out = tmp_path / "out"
        return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}

    return run


def test_what_a_user_needs_is_copied_byte_for_byte_and_the_rest_is_not(copied):
    needed = {name: f"bytes of {name}\r\n".encode() for name in NEEDED}
    assert copied(needed | dict.fromkeys(LEFT, b"x")) == needed


def test_places_on_a_machine_are_dropped_from_settings_and_nothing_else_is(copied):
    kept = {"bos_token": "<s>", "name_or_path": "org/model", "chat_template": "/home/{{ x }}", "path": "1_Pooling"}
    local = {
        "tokenizer_config.json": kept | {"tokenizer_file": "/home/ann/.cache/t.json", "_commit_hash": "ab"},
        "preprocessor_config.json": {"a": [{"_name_or_path": "x", "b": 1}], "vocab_file": "C:\\models\\v.txt"},
    }
    plain = {"generation_config.json": b'{"_from_model_config": true,  "eos_token_id": 2}'}
    found = copied({name: json.dumps(content).encode() for name, content in local.items()} | plain)
    assert json.loads(found["tokenizer_config.json"]) == kept
    assert json.loads(found["preprocessor_config.json"]) == {"a": [{"b": 1}]}
    assert found["generation_config.json"] == plain["generation_config.json"]


@pytest.mark.parametrize("content", [b"not json", b"[1, 2]", b"\xff\xfe", b""])
def test_what_is_no_settings_is_copied_as_it_is(copied, content):
    assert copied({"odd_config.json": content}) == {"odd_config.json": content}


def test_a_config_forgets_where_it_came_from_at_any_depth():
    config = {
        "_name_or_path": "/home/ann/llama",
        "auto_map": {"AutoConfig": "org/code--configuration_x.X"},
        "text_config": {"_name_or_path": "org/text", "hidden_size": 64, "deeper": {"_commit_hash": "ab"}},
        "encoder": {"base_model_name_or_path": "~/encoder", "other_name_or_path": "org/encoder"},
        "layer_types": ["a", "b"],
    }
    assert portable(config) == {
        "auto_map": {"AutoConfig": "org/code--configuration_x.X"},
        "text_config": {"hidden_size": 64, "deeper": {}},
        "encoder": {"other_name_or_path": "org/encoder"},
        "layer_types": ["a", "b"],
    }

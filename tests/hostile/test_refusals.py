"""A damaged or hostile source is refused before calibration, by name, and leaves nothing behind."""

import json
import os
import re
import shutil

import pytest
import torch
from tests.hostile.damage import (
    CONFIG,
    EMBEDDING,
    INDEX,
    NORM,
    SHARDS,
    UP,
    bounded,
    change_json,
    content,
    entry,
    header,
    index,
    join,
    split,
    tensors,
    tree,
)

import hessquant
from hessquant.errors import HessquantError, PlanError, RefusedError, SourceError

FIRST, SECOND = SHARDS
ONCE = [[1, 2, 3, 4]]


def shift(name, begin, end):
    """Moves both offsets of a tensor."""

    def change(found):
        offsets = found[name]["data_offsets"]
        found[name]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]

    return header(change)


def repeat_key(found):
    text = json.dumps(found)
    return (text[:-1] + f', "{UP}": {json.dumps(found[UP])}}}').encode()


def move_into_single_file(directory):
    for file in (FIRST, INDEX):
        (directory / file).unlink()
    (directory / SECOND).rename(directory / "model.safetensors")


def replace_by(make):
    """Puts something else in place of the second shard."""

    def damage(directory):
        (directory / SECOND).unlink()
        make(directory / SECOND)

    return damage


def pickle_only(directory):
    for file in (*SHARDS, INDEX):
        (directory / file).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


def raw(file, text):
    return lambda directory: (directory / file).write_bytes(text)


def enlarge(file):
    """A terabyte of zeros, which takes no room on the disk."""

    def damage(directory):
        os.truncate(directory / file, 1 << 40)

    return damage


def set_value(name, value, dtype=torch.bfloat16, shard=1):
    """Puts one value in the midst of a tensor of a dtype."""

    def change(found):
        found[name] = found[name].to(dtype)
        found[name].view(-1)[-7] = value

    return tensors(change, shard)


def store_as(name, dtype, scale=None, shard=1):
    def change(found):
        found[name] = (found[name].float() * 100).to(dtype)
        if scale:
            found[f"{name}{scale}"] = torch.ones(1)

    return tensors(change, shard)


def pack(found):
    module = UP.removesuffix(".weight")
    del found[UP]
    found[f"{module}.qweight"] = torch.zeros(8, 96, dtype=torch.int32)
    found[f"{module}.scales"] = torch.ones(2, 96, dtype=torch.float16)


def truncate(count):
    return content(lambda found: found[:-count])


def claim_header_of(length):
    return content(lambda found: length.to_bytes(8, "little") + found[8:])


NOT_WHOLE = re.escape(f"{SECOND} is not a whole safetensors file")
UP_, NORM_, EMBEDDING_ = re.escape(UP), re.escape(NORM), re.escape(EMBEDDING)
IN_SECOND, IN_FIRST = re.escape(SECOND), re.escape(FIRST)
WAY_OUT = "start from the original 16-bit model, or dequantize it first"

DAMAGED_SHARDS = {
    "a shard is missing": (lambda d: (d / SECOND).unlink(), f"{IN_SECOND} is missing"),
    "a shard is a dangling link": (replace_by(lambda p: p.symlink_to("nowhere")), f"{IN_SECOND} is missing"),
    "a shard is a folder": (replace_by(lambda p: p.mkdir()), f"{NOT_WHOLE}.*not a regular file"),
    "a shard is a pipe": (replace_by(os.mkfifo), f"{NOT_WHOLE}.*not a regular file"),
    "a shard is a device": (replace_by(lambda p: p.symlink_to("/dev/zero")), f"{NOT_WHOLE}.*not a regular file"),
    "a shard is empty": (content(lambda found: b""), f"{NOT_WHOLE} .it has 0 bytes"),
    "1 kB is cut off": (
        truncate(1024),
        rf"{NOT_WHOLE} .tensor model\.layers\.1\.\S+ ends at byte \d+, the file at \d+",
    ),
    "1 byte is cut off": (truncate(1), rf"{NOT_WHOLE} .tensor {NORM_} ends at byte \d+, the file at \d+"),
    "a terabyte is added": (enlarge(SECOND), f"{NOT_WHOLE} .its last \\d+ bytes belong to no tensor"),
    "1 byte is added": (content(lambda found: found + b"x"), f"{NOT_WHOLE} .its last 1 bytes belong to no tensor"),
    "the header is 2^60 bytes long": (claim_header_of(1 << 60), f"{NOT_WHOLE}.*its header would have {1 << 60}"),
    "the header is 2^64 - 1 bytes long": (claim_header_of((1 << 64) - 1), f"{NOT_WHOLE}.*header would have"),
    "the header is not JSON": (claim_header_of(100), NOT_WHOLE),
    "the header is a list": (header(lambda _: [1, 2]), NOT_WHOLE),
    "the header is deeply nested": (header(lambda _: b'{"a":' * 100_000), NOT_WHOLE),
    "the header is not text": (header(lambda _: b'{"\xff": 1}'), NOT_WHOLE),
    "a name is no text": (header(lambda found: found | {"\ud800": found[UP]}), NOT_WHOLE),
    "a tensor is there twice in the header": (header(repeat_key), f"{NOT_WHOLE} .its header names {UP_} twice"),
    "a shape is too large": (entry(UP, shape=[97, 64]), f"{NOT_WHOLE} .tensor {UP_} has 12288 bytes, but needs 12416"),
    "a shape is too small": (entry(UP, shape=[95, 64]), f"{NOT_WHOLE} .tensor {UP_} has 12288 bytes, but needs 12160"),
    "a dtype is too wide": (entry(UP, dtype="F32"), f"{NOT_WHOLE} .tensor {UP_} has 12288 bytes, but needs 24576"),
    "a dtype is not known": (entry(UP, dtype="F4"), f"{IN_SECOND}: tensor {UP_} has dtype F4, which cannot be read"),
    "tensors overlap": (shift(UP, -2, -2), f"{NOT_WHOLE} .tensor {UP_} begins at byte"),
    "there is a hole between tensors": (shift(UP, 2, 2), f"{NOT_WHOLE} .tensor {UP_} begins at byte"),
    "a tensor lies behind the file": (shift(NORM, 1 << 40, 1 << 40), f"{NOT_WHOLE} .tensor {NORM_} begins at byte"),
    "offsets are in reverse": (shift(UP, 12288, -12288), f"{NOT_WHOLE} .tensor {UP_} has -12288 bytes"),
    "an offset is negative": (entry(UP, data_offsets=[-12288, 0]), f"{NOT_WHOLE}.*tensor {UP_} means nothing"),
    "a dimension is negative": (entry(UP, shape=[-96, -64]), f"{NOT_WHOLE}.*tensor {UP_} means nothing"),
    "an offset is 2^63": (entry(UP, data_offsets=[1 << 63, (1 << 63) + 12288]), f"{NOT_WHOLE} .tensor"),
    "an offset is 2^64": (entry(UP, data_offsets=[1 << 64, (1 << 64) + 12288]), f"{NOT_WHOLE}.*{UP_} means nothing"),
    "an offset has 5000 digits": (entry(UP, data_offsets=[0, 10**4000]), f"{NOT_WHOLE}.*{UP_} means nothing"),
    "dimensions overflow to the right size": (entry(UP, shape=[1 << 32, 1 << 32, 96, 64]), f"{NOT_WHOLE}.*{UP_}"),
    "a dimension is a fraction": (entry(UP, shape=[96.0, 64]), f"{NOT_WHOLE}.*tensor {UP_} means nothing"),
    "an entry has no shape": (header(lambda found: found[UP].pop("shape") and None), f"{NOT_WHOLE}.*{UP_} means"),
    "a tensor is in two shards": (
        lambda d: tensors(lambda found: found.update({NORM: torch.ones(64)}), shard=0)(d) or index(**{NORM: SECOND})(d),
        f"tensor {NORM_} is in both {IN_FIRST} and {IN_SECOND}",
    ),
}

DAMAGED_INDEXES = {
    "a tensor is not in its shard": (index(ghost=SECOND), f"{IN_SECOND} holds tensor ghost, but it does not"),
    "a tensor is not in the index": (index(**{UP: ...}), f"tensor {UP_} is in {IN_SECOND} but not in {INDEX}"),
    "a tensor is said to be in another shard": (index(**{UP: FIRST}), f"{IN_FIRST} holds tensor {UP_}, but it does"),
    **{
        f"a shard is {file}": (index(**{UP: file}), rf"{INDEX} puts tensor {UP_} in .*not a plain file name")
        for file in (
            "../x.safetensors",
            "/etc/x.safetensors",
            "sub/x.safetensors",
            "C:\\x.safetensors",
            "C:x.safetensors",
            "\\\\host\\x.safetensors",
            "..\\x.safetensors",
            "..",
            "",
            None,
            ["x.safetensors"],
        )
    },
    "a shard is a pickle": (
        index(**{UP: "x.bin"}),
        rf"{INDEX} puts tensor {UP_} in x\.bin, which is not",
    ),
    "a shard's name is 300 letters": (index(**{UP: "x" * 300 + ".safetensors"}), "xxx.safetensors is not a whole"),
    "a shard's name is no text": (index(**{UP: "\ud800.safetensors"}), rf"{INDEX} is not readable JSON"),
    "a shard's name holds a zero": (index(**{UP: "x\0.safetensors"}), "x\0.safetensors is not a whole"),
    "it is a terabyte": (enlarge(INDEX), f"{INDEX} is not readable JSON: it has more than"),
    "it is no object": (raw(INDEX, b"[]"), f"{INDEX} holds a JSON list"),
    "it is not JSON": (raw(INDEX, b"{"), f"{INDEX} is not readable JSON"),
    "it is deeply nested": (raw(INDEX, b'{"weight_map":' * 100_000), f"{INDEX} is not readable JSON"),
    "it has no map": (raw(INDEX, b"{}"), f"{INDEX} has no weight_map"),
    "its map is a list": (change_json(INDEX, weight_map=[UP]), f"{INDEX} has no weight_map"),
    "its map is empty": (change_json(INDEX, weight_map={}), f"{INDEX} has no weight_map"),
    "there is a single file besides": (lambda d: shutil.copy(d / FIRST, d / "model.safetensors"), "holds both"),
    "there are only pickles": (pickle_only, r"only pickle weights \(pytorch_model\.bin\).*convert it to safetensors"),
    "there is a single file of half the model": (move_into_single_file, r"the checkpoint has no model\.layers\.0\."),
}

DAMAGED_CONFIGS = {
    "it is missing": (lambda d: (d / CONFIG).unlink(), r"no config\.json"),
    "it is a pipe": (lambda d: (d / CONFIG).unlink() or os.mkfifo(d / CONFIG), r"no config\.json"),
    "it is a device": (
        lambda d: (d / CONFIG).unlink() or (d / CONFIG).symlink_to("/dev/zero"),
        r"no config\.json",
    ),
    "it is a terabyte": (enlarge(CONFIG), r"config\.json is not readable JSON: it has more than"),
    "it is not JSON": (raw(CONFIG, b"{"), r"config\.json is not readable JSON"),
    "it is not text": (raw(CONFIG, b'{"a": "\xff"}'), r"config\.json is not readable JSON"),
    "it holds no text": (raw(CONFIG, b'{"a": "\\ud800"}'), r"config\.json is not readable JSON"),
    "it is a list": (raw(CONFIG, b"[]"), r"config\.json holds a JSON list"),
    "it is deeply nested": (raw(CONFIG, b'{"a":' * 100_000), r"config\.json is not readable JSON"),
    "it is nested 600 times": (
        raw(CONFIG, b'{"model_type": "llama", "a":' + b'{"a":' * 600 + b"1" + b"}" * 601),
        r"config\.json cannot be used: maximum recursion depth",
    ),
    "its architecture is not known": (
        change_json(CONFIG, model_type="x-llama"),
        r"config\.json cannot be.*x-llama",
    ),
    "it has no architecture": (change_json(CONFIG, model_type=...), r"config\.json cannot be used"),
    "its architecture is a list": (change_json(CONFIG, model_type=["llama"]), r"config\.json cannot be used"),
    "its architecture makes no text": (
        change_json(CONFIG, model_type="vit"),
        "no model can be built",
    ),
    "a count is text": (change_json(CONFIG, vocab_size="97"), r"config\.json cannot be used.*vocab_size"),
    "a count is nothing": (change_json(CONFIG, hidden_size=None), r"config\.json cannot be used.*hidden_size"),
    "a count is 0": (change_json(CONFIG, num_attention_heads=0), r"config\.json cannot be used"),
    "a count is negative": (change_json(CONFIG, hidden_size=-64), "-64|negative"),
    "it has 10^9 blocks": (change_json(CONFIG, num_hidden_layers=10**9), r"num_hidden_layers is 1000000000, and no"),
    "it has 10^12 labels": (change_json(CONFIG, num_labels=10**12), "num_labels is 1000000000000, and no model"),
    "it is that of a deeper model": (change_json(CONFIG, num_hidden_layers=3), r"has no model\.layers\.2\."),
    "it is that of a wider model": (
        change_json(CONFIG, intermediate_size=128),
        rf"mlp\.down_proj\.weight is \[64, 96\] in {IN_FIRST}, but \[64, 128\] according to config\.json",
    ),
    "it is that of a larger vocabulary": (
        change_json(CONFIG, vocab_size=98),
        rf"{EMBEDDING_} is \[97, 64\] in {IN_FIRST}, but \[98, 64\] according to config\.json",
    ),
    "it asks for code": (
        change_json(CONFIG, model_type="own", auto_map={"AutoConfig": "code.Config"}),
        r"config\.json cannot be used.*trust_remote_code",
    ),
    "it says that the model is quantized": (
        change_json(CONFIG, quantization_config={"quant_method": "awq", "bits": 4}),
        rf"quantized already \(awq, says its config\.json\); {WAY_OUT}",
    ),
    "its quantization is a list": (change_json(CONFIG, quantization_config=[]), r"config\.json cannot be used"),
}

DAMAGED_TENSORS = {
    **{
        f"{dtype} {name} holds {value}": (
            set_value(name, float(value), getattr(torch, dtype), shard),
            rf"{IN_FIRST if shard == 0 else IN_SECOND}: tensor {re.escape(name)} is {value} at \[{place}\]",
        )
        for name, shard, place in ((UP, 1, "95, 57"), (EMBEDDING, 0, "96, 57"), (NORM, 1, "57"))
        for dtype, value in (("float16", "nan"), ("bfloat16", "inf"), ("float32", "-inf"))
    },
    "a tensor that the model does not know is NaN": (
        tensors(lambda found: found.update({"extra": torch.tensor(float("nan"))})),
        rf"{IN_SECOND}: tensor extra is nan at \[\]",
    ),
    "a weight is FP8 with scales": (
        store_as(UP, torch.float8_e4m3fn, "_scale_inv"),
        rf"{UP_} holds F8_E4M3 values in {IN_SECOND}.*{WAY_OUT}.*FineGrainedFP8Config\(dequantize=True\)",
    ),
    "a weight is int8 with scales": (
        store_as(UP, torch.int8, "_scale"),
        f"{UP_} holds I8 values in {IN_SECOND}.*{WAY_OUT}",
    ),
    "the embedding is int8": (store_as(EMBEDDING, torch.int8, "_scale", 0), f"{EMBEDDING_} holds I8 values.*{WAY_OUT}"),
    "a norm is FP8": (store_as(NORM, torch.float8_e5m2), f"{NORM_} holds F8_E5M2 values in {IN_SECOND}.*{WAY_OUT}"),
    "a weight is packed, and the config does not say so": (tensors(pack), f"has no {UP_}"),
    "a norm is missing": (tensors(lambda found: found.pop(NORM)), f"missing: {NORM_}"),
    "a weight is transposed": (
        tensors(lambda found: found.update({UP: found[UP].T.contiguous()})),
        rf"{UP_} is \[64, 96\] in {IN_SECOND}, but \[96, 64\]",
    ),
}

TABLE = {
    f"{what}: {case}": damage
    for what, cases in {
        "shard": DAMAGED_SHARDS,
        "index": DAMAGED_INDEXES,
        "config": DAMAGED_CONFIGS,
        "tensor": DAMAGED_TENSORS,
    }.items()
    for case, damage in cases.items()
}


@pytest.fixture
def model(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _never_calibrates(monkeypatch):
    monkeypatch.setattr("hessquant.pipeline.quantizing.quantize_segments", lambda *_: pytest.fail("calibrates"))


@pytest.mark.parametrize(("damage", "pattern"), TABLE.values(), ids=TABLE)
def test_a_damaged_source_is_refused_by_name_and_nothing_is_written(damage, pattern, model, tmp_path):
    damage(model)
    before = tree(tmp_path)
    with bounded(), pytest.raises(RefusedError) as refused:
        hessquant.quantize(str(model), tmp_path / "out", hessquant.Config(group_size=32), calibration=ONCE)
    assert isinstance(refused.value, SourceError | PlanError)
    assert re.search(pattern, str(refused.value), re.DOTALL), str(refused.value)
    str(refused.value).encode()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["x" * 300, "~no-such-user-of-this-machine/model", "a\0b", "x" * 300 + ".gguf"])
def test_a_name_that_can_be_no_path_is_refused(name, tmp_path):
    with pytest.raises(SourceError, match=r"no such|cannot be looked up"):
        hessquant.quantize(name, tmp_path / "out", calibration=ONCE)
    with pytest.raises(SourceError, match=r"is not a directory|cannot be read"):
        hessquant.inspect(name)


def test_code_of_a_known_architecture_is_left_alone(model, tmp_path):
    ran = tmp_path / "ran"
    (model / "code.py").write_text(f"import pathlib; pathlib.Path({str(ran)!r}).touch()")
    named = {auto: "code.Anything" for auto in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    change_json(CONFIG, auto_map=named)(model)
    assert len(hessquant.make_plan(str(model), hessquant.Config(group_size=32)).targets) == 14
    assert not ran.exists()


def test_a_tokenizer_that_panics_is_refused(model, tmp_path):
    vocabulary = {"<s>": 0, "a": 1, "b": 2, "ab": 3}
    # Longer than the words it is cut from: an index that underflows, inside a library of Rust.
    broken = {"type": "BPE", "continuing_subword_prefix": "aaaaaaaa", "vocab": vocabulary, "merges": [["a", "b"]]}
    (model / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": broken}))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    before = tree(tmp_path)
    with pytest.raises(SourceError, match=r"no tokenizer can be made.*panicked"):
        hessquant.quantize(str(model), tmp_path / "out", hessquant.Config(group_size=32))
    assert tree(tmp_path) == before


def test_a_lie_that_leaves_the_data_as_they_are_is_still_no_error_of_another_kind(model):
    found, data = split((model / SECOND).read_bytes())
    found[UP]["shape"] = [1] * 1000 + [96, 64]
    (model / SECOND).write_bytes(join(found, data))
    with pytest.raises(HessquantError, match=UP_):
        hessquant.make_plan(str(model), hessquant.Config(group_size=32))

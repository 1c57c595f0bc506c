"""The gguf format, end to end on a tiny model: made, found sound, evaluated, exported to, and never half there."""

import json

import pytest
import torch
from benchmarks.loading import load_model
from gguf import GGUFReader
from tests.checkpoint.gguf_cases import byte_level, save_model, save_tokenizer

import hessquant
from hessquant.errors import PlanError, SourceError, VerificationError
from hessquant.models.source import resolve
from hessquant.options import parse_override

SETTINGS = {"group_size": 32, "num_windows": 4, "window_length": 16}


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    tokenizer = byte_level()
    save_model(directory, "llama", tokenizer)
    save_tokenizer(directory, tokenizer)
    return directory


TOKENS = torch.randint(0, 200, (4, 16), generator=torch.Generator().manual_seed(0))


def quantize(source, out, **settings):
    return hessquant.quantize(str(source), out, hessquant.Config(**(SETTINGS | settings)), calibration=TOKENS)


def logits(directory):
    with torch.no_grad():
        return load_model(resolve(str(directory)))(input_ids=TOKENS).logits


def test_a_model_is_made_of_one_file_that_says_the_same(source, tmp_path):
    report = quantize(source, tmp_path / "out", format="gguf", overrides=(parse_override("mlp.down_proj=bits:8"),))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.gguf",
        "hessquant-report.json",
        "hessquant-report.html",
    }
    found = hessquant.inspect(tmp_path / "out")
    assert found.faults == ()
    assert {weight.grid.bits for weight in found.weights} == {4, 8}
    assert sum(weight.bytes for weight in found.weights) == report.plan.output_bytes - sum(
        tensor.bytes for tensor in report.plan.untouched
    )
    quantize(source, tmp_path / "other", overrides=(parse_override("mlp.down_proj=bits:8"),))
    # The file is read back through float16.
    assert torch.allclose(logits(tmp_path / "out"), logits(tmp_path / "other"), atol=2e-2)
    assert not torch.allclose(logits(tmp_path / "out"), logits(source), atol=2e-2)


def test_the_same_command_on_a_finished_file_gives_its_report(source, tmp_path):
    first = quantize(source, tmp_path / "out", format="gguf")
    stamp = (tmp_path / "out" / "model.gguf").stat().st_mtime_ns
    assert quantize(source, tmp_path / "out", format="gguf").run == first.run
    assert (tmp_path / "out" / "model.gguf").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("before", ["gptq", "compressed-tensors"])
def test_an_export_gives_the_file_that_quantizing_gives(source, tmp_path, before):
    quantize(source, tmp_path / "out", format="gguf")
    quantize(source, tmp_path / "first", format=before)
    hessquant.export(tmp_path / "first", tmp_path / "second", hessquant.Config(format="gguf"))
    first, second = (
        {tensor.name: (tensor.tensor_type, tensor.data.tobytes()) for tensor in GGUFReader(tmp_path / name).tensors}
        for name in ("out/model.gguf", "second/model.gguf")
    )
    assert first == second
    told = json.loads((tmp_path / "second" / "hessquant-report.json").read_text())
    assert told["settings"]["format"] == "gguf"


def test_a_file_that_does_not_verify_never_gets_its_name(source, tmp_path, monkeypatch):
    def refuse(*_):
        raise VerificationError("differs")

    with monkeypatch.context() as patch:
        patch.setattr("hessquant.checkpoint.gguf_writer.verify_gguf", refuse)
        with pytest.raises(VerificationError):
            quantize(source, tmp_path / "out", format="gguf")
    assert not list((tmp_path / "out").glob("*.gguf"))
    assert quantize(source, tmp_path / "out", format="gguf").resumed_blocks == 2
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("command", ["plan", "quantize", "export"])
def test_a_model_without_a_form_in_it_is_refused_before_any_work(source, tmp_path, command):
    if command == "export":
        quantize(source, tmp_path / "first")
        source = tmp_path / "first"
    (source / "tokenizer.json").unlink()
    gguf = hessquant.Config(**SETTINGS, format="gguf")
    commands = {
        "plan": lambda: hessquant.make_plan(str(source), gguf),
        "quantize": lambda: quantize(source, tmp_path / "out", format="gguf"),
        "export": lambda: hessquant.export(source, tmp_path / "out", gguf),
    }
    with pytest.raises(PlanError, match=r"gguf format cannot hold this model: .*tokenizer"):
        commands[command]()
    assert not (tmp_path / "out").exists()


def test_a_scale_that_is_not_finite_is_found_and_named(source, tmp_path):
    quantize(source, tmp_path / "out", format="gguf")
    file = tmp_path / "out" / "model.gguf"
    tensor = next(t for t in GGUFReader(file).tensors if t.name == "blk.1.ffn_up.weight")
    content = bytearray(file.read_bytes())
    content[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7c"  # float16 infinity: the first block's scale
    file.write_bytes(content)
    (fault,) = hessquant.inspect(file).faults
    assert fault.startswith("blk.1.ffn_up.weight has ")


def test_a_file_that_was_cut_off_is_refused(source, tmp_path):
    quantize(source, tmp_path / "out", format="gguf")
    file = tmp_path / "out" / "model.gguf"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SourceError, match="not a whole GGUF file"):
        hessquant.inspect(tmp_path / "out")

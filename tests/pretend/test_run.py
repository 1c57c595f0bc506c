"""Whole runs on an accelerator write the bytes that the CPU writes."""

import gc
import hashlib

import pytest
import torch
from tests.architectures.families import OTHERS, build, text_ids, tiny
from tests.tiny import TINY, tokens
from transformers import GPT2Config, LlamaConfig, MixtralConfig

import hessquant
from hessquant.capture.prelude import record_arguments
from hessquant.errors import NonFiniteError
from hessquant.place import multiplies_into_float32

ONE_BLOCK = TINY | {"num_hidden_layers": 1}
LLAMA = LlamaConfig(**ONE_BLOCK)
GPT2 = GPT2Config(n_embd=64, n_layer=1, n_head=4, n_inner=64, vocab_size=97, bos_token_id=1, eos_token_id=2)
MIXTRAL = MixtralConfig(**ONE_BLOCK, num_local_experts=4, num_experts_per_tok=2)

SETTINGS = {
    "group_size": 32,
    "scale_search": False,
    "refinement_rounds": 0,
    "max_unquantized": 1.0,
    "format": "compressed-tensors",
    "forward_dtype": "float32",
}

CASES = {
    "llama": (LLAMA, {"scale_search": True, "refinement_rounds": 1}),
    "passes": (LLAMA, {"capture": "passes"}),
    "dynamic scales": (LLAMA, {"scales": "dynamic", "order": "group"}),
    "head": (LlamaConfig(**(ONE_BLOCK | {"vocab_size": 96})), {"include": ("lm_head",), "format": "gptq"}),
    "transposed": (GPT2, {"format": "gptq"}),
    "experts": (MIXTRAL, {}),
    "every expert": (MIXTRAL, {"experts": "all", "capture": "passes"}),
}


def written(directory, but=("hessquant-report.json", "hessquant-report.html")):
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in but)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def quantize(model, out, calibration=None, **settings):
    config = hessquant.Config(**(SETTINGS | settings))
    return hessquant.quantize(model, out, config, calibration=[tokens(4, 16)] if calibration is None else calibration)


@pytest.fixture
def compare(tmp_path, request):
    def compare(model, calibration=None, **settings):
        here = quantize(model, tmp_path / "here", calibration, **settings)
        accelerator = request.getfixturevalue("accelerator")
        before = accelerator.memory_allocated()
        accelerator.reset_peak_memory_stats()
        there = quantize(model, tmp_path / "there", calibration, **settings)
        assert accelerator.max_memory_allocated() > before
        assert written(tmp_path / "there") == written(tmp_path / "here")
        assert [layer.loss for layer in there.layers] == pytest.approx([layer.loss for layer in here.layers], rel=1e-6)
        return there

    return compare


@pytest.mark.parametrize("name", CASES)
def test_a_run_there_writes_what_one_here_writes(name, make_model, compare):
    config, settings = CASES[name]
    report = compare(make_model(config), **settings)
    assert report.verified_tensors == len(report.layers) > 0


@pytest.mark.parametrize(
    "class_name", ["AlbertForMaskedLM", "T5ForConditionalGeneration", "LlavaForConditionalGeneration"]
)
def test_so_does_one_of_a_model_without_a_row_of_blocks(class_name, compare, tmp_path):
    other = next(other for other in OTHERS if other.class_name == class_name)
    config = tiny(other.model_type)
    build(config, class_name).save_pretrained(tmp_path / "model")
    samples = {
        "T5": [{"input_ids": text_ids(seed, 24), "labels": text_ids(seed + 9, 16)} for seed in range(2)],
        "Ll": [other.image_inputs(config)] if other.image_inputs else [],
    }
    calibration = samples.get(class_name[:2]) or [text_ids(seed, 32) for seed in range(2)]
    report = compare(str(tmp_path / "model"), calibration, bits=8)
    assert len(report.layers) > 0


def test_a_run_that_stopped_goes_on_there_to_the_same_bytes(make_model, accelerator, tmp_path, monkeypatch):
    model = make_model(LlamaConfig(**TINY))
    quantize(model, tmp_path / "whole")

    class Stopped(Exception):
        pass

    with pytest.MonkeyPatch.context() as patch:

        def stop(*_):
            raise Stopped

        patch.setattr("hessquant.pipeline.quantizing.write_verified", stop)
        with pytest.raises(Stopped):
            quantize(model, tmp_path / "out")
    (tmp_path / "out.run" / "block-00001.json").unlink()
    report = quantize(model, tmp_path / "out")
    assert report.resumed_blocks == 1
    assert written(tmp_path / "out") == written(tmp_path / "whole")


def waits_of(accelerator, model, out, calibration):
    accelerator.waits.clear()
    quantize(model, out, calibration)
    return dict(accelerator.waits)


def test_neither_tokens_nor_columns_make_the_host_wait_more(make_model, accelerator, tmp_path):
    model = make_model(LLAMA)
    usual = waits_of(accelerator, model, tmp_path / "usual", [tokens(4, 16)])
    assert usual == waits_of(accelerator, model, tmp_path / "longer", [tokens(4, 48)])
    wider = make_model(LlamaConfig(**(ONE_BLOCK | {"hidden_size": 128, "intermediate_size": 192})))
    assert usual == waits_of(accelerator, wider, tmp_path / "wider", [tokens(4, 16)])


@pytest.mark.parametrize("forward_dtype", ["float32", "source"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_batch_makes_the_host_wait_a_few_times_however_many_blocks_there_are(
    blocks, forward_dtype, make_model, accelerator, tmp_path, monkeypatch
):
    monkeypatch.setattr("hessquant.planning.size._TOKENS_PER_DEVICE_BATCH", (16, 16))
    model = make_model(LlamaConfig(**(TINY | {"num_hidden_layers": blocks})))
    multiplies_into_float32(accelerator.device, torch.bfloat16)  # is asked once in a process
    waits = []
    for windows in (2, 4):
        accelerator.waits.clear()
        out = tmp_path / str(windows)
        quantize(model, out, [tokens(windows, 16)], forward_dtype=forward_dtype)
        waits.append(accelerator.waited())
    # Its ids are copied, transformers looks whether any is masked, and its arguments are found to be those of the batch
    # before: cosines, sines, positions and their cache.
    assert waits[1] - waits[0] == 2 * (1 + 1 + 4)


@pytest.mark.parametrize("forward_dtype", ["float32", "source"])
@pytest.mark.parametrize("capture", ["once", "passes"])
def test_a_bad_window_is_named_there_too(capture, forward_dtype, make_model, accelerator, tmp_path, monkeypatch):
    monkeypatch.setattr("hessquant.planning.size._TOKENS_PER_DEVICE_BATCH", (32, 32))

    def poisoned(*args):
        states = record_arguments(*args)
        for bad in (7, 3):
            state = next(state for state in states if bad in state.windows)
            state.hidden[state.windows.index(bad), 9, 11] = float("nan")
        return states

    monkeypatch.setattr("hessquant.run.loop.record_arguments", poisoned)
    message = r"layers\.0\.self_attn\.q_proj\.weight: the input is nan in calibration window 3, token 9, channel 0;"
    with pytest.raises(NonFiniteError, match=message):
        quantize(make_model(LLAMA), tmp_path / "out", [tokens(10, 16)], capture=capture, forward_dtype=forward_dtype)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["llama", "experts", "every expert"])
def test_a_run_in_16_bit_gives_the_losses_that_it_gives_here(name, make_model, accelerator, tmp_path, monkeypatch):
    config, settings = CASES[name]
    model, products = make_model(config), []
    multiply = torch.mm

    def mm(*args, **kwargs):
        products.append(kwargs)
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", mm)
    reports = [
        quantize(model, tmp_path / device, device=device, **settings, forward_dtype="source")
        for device in ("cpu", "auto")
    ]
    assert products.count({"out_dtype": torch.float32}) >= 4
    here, there = ([layer.loss for layer in report.layers] for report in reports)
    assert there == pytest.approx(here, rel=0.1)  # other codes follow where two are as good


def test_a_run_leaves_nothing_there(make_model, accelerator, tmp_path):
    model = make_model(LLAMA)
    gc.collect()
    before = accelerator.memory_allocated()
    quantize(model, tmp_path / "out")
    gc.collect()
    assert accelerator.memory_allocated() == before

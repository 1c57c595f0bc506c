"""Whole runs on an accelerator write the bytes that the CPU writes."""

import gc
import hashlib

import pytest
from tests.architectures.families import OTHERS, build, text_ids, tiny
from tests.tiny import TINY, tokens
from transformers import GPT2Config, LlamaConfig, MixtralConfig

import hessquant

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
        assert [layer.loss for layer in there.layers] == [layer.loss for layer in here.layers]
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


def test_a_batch_makes_the_host_wait_a_few_times(make_model, accelerator, tmp_path, monkeypatch):
    monkeypatch.setattr("hessquant.planning.size._TOKENS_PER_DEVICE_BATCH", (16, 16))
    model = make_model(LLAMA)
    four, eight = (
        sum(waits_of(accelerator, model, tmp_path / str(windows), [tokens(windows, 16)]).values()) for windows in (4, 8)
    )
    # Its ids are copied; its inputs are found finite at four stops, and its arguments to be those of the batch before.
    assert eight - four <= 4 * 11


def test_a_run_leaves_nothing_there(make_model, accelerator, tmp_path):
    model = make_model(LLAMA)
    gc.collect()
    before = accelerator.memory_allocated()
    quantize(model, tmp_path / "out")
    gc.collect()
    assert accelerator.memory_allocated() == before

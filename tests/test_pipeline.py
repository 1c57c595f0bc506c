"""The whole job on tiny random models."""

import hashlib
import json

import pytest
import torch
from benchmarks.loading import decoded_state
from benchmarks.loading import load_model as load_for_evaluation
from safetensors.torch import load_file, save_file
from tests.tiny import TINY, tokens
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PhiConfig, Qwen2Config

import hessquant
from hessquant.capture.prelude import record_arguments
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import CalibrationError, NonFiniteError, OutputError, ServeError, SourceError, VerificationError
from hessquant.models.probe import probe
from hessquant.models.source import resolve
from hessquant.results import RunReport


@pytest.fixture
def make_model(tmp_path):
    def make(config, dtype=torch.bfloat16):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        model.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make


@pytest.fixture
def llama(make_model):
    return make_model(LlamaConfig(**TINY))


def logits(model):
    """Of the model as `evaluate` loads it, quantized or not."""
    with torch.no_grad():
        return load_for_evaluation(resolve(model))(input_ids=tokens(2)).logits


def written(directory):
    with CheckpointReader(directory) as reader:
        return {name: reader.read(name).view(torch.uint8) for name in reader.tensors}


def digests(directory, but=("hessquant-report.json", "hessquant-report.html")):
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in but)
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        Qwen2Config(**TINY, tie_word_embeddings=True),
        GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=64, vocab_size=97, bos_token_id=1, eos_token_id=2),
        # Attention and MLP in parallel: weights far apart in the forward pass see one input.
        PhiConfig(**TINY),
    ],
    ids=["llama", "qwen2", "gpt2", "phi"],
)
def test_a_model_becomes_a_checkpoint_that_decodes_to_what_was_solved(config, make_model, tmp_path):
    model, out = make_model(config), tmp_path / "out"
    report = hessquant.quantize(model, out, hessquant.Config(group_size=32), calibration=[tokens()])
    assert isinstance(report, RunReport)
    assert report.verified_tensors == len(report.layers) == len(report.plan.targets) > 0
    assert report.forwards_per_block == 1
    assert report.degraded == ()
    assert all(layer.method == "gptq" and layer.loss <= layer.rtn_loss for layer in report.layers)
    assert hessquant.inspect(out).faults == ()
    before, after = logits(model), logits(str(out))
    assert 0 < (after - before).abs().mean() < 0.2 * before.abs().mean()
    saved = json.loads((out / "hessquant-report.json").read_text())
    assert saved["layers"][0]["loss"] == report.layers[0].loss
    assert saved["calibration"]["tokens"] == 512


def test_forward_once_and_passes_give_the_same_bytes(llama, tmp_path):
    for capture in ("once", "passes"):
        hessquant.quantize(
            llama, tmp_path / capture, hessquant.Config(group_size=32, capture=capture), calibration=[tokens()]
        )
    assert digests(tmp_path / "once") == digests(tmp_path / "passes")


def test_token_weights_change_what_feeds_attention_first(llama, tmp_path):
    for weights in ("attention", "uniform"):
        config = hessquant.Config(group_size=32, token_weights=weights)
        hessquant.quantize(llama, tmp_path / weights, config, calibration=[tokens()])
    ours, plain = (written(tmp_path / weights) for weights in ("attention", "uniform"))
    changed = {name for name, value in ours.items() if not torch.equal(value, plain[name])}
    for name in "qkv":
        assert f"model.layers.0.self_attn.{name}_proj.qweight" in changed


def test_the_memory_given_to_activations_changes_no_byte(llama, tmp_path):
    # 16 windows of 32 tokens of 64 float32 values are 131,072 bytes between blocks.
    cases = {
        "ample": ({"activation_memory": 10**9}, "once", 0),
        "part": ({"activation_memory": 40_000}, "passes", 131_072 - 32_768),
        "none": ({"activation_memory": 0}, "passes", 131_072),
        "once": ({"activation_memory": 0, "capture": "once"}, "once", 131_072),
    }
    for name, (settings, capture, mapped) in cases.items():
        config = hessquant.Config(group_size=32, **settings)
        calibration = [tokens(4, 32, seed) for seed in range(4)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hessquant.planning.size.TOKENS_PER_BATCH", 128)
            report = hessquant.quantize(llama, tmp_path / name, config, calibration=calibration)
        assert (report.capture, report.mapped_activation_bytes) == (capture, mapped)
        assert digests(tmp_path / name) == digests(tmp_path / "ample")


def test_the_same_run_gives_the_same_bytes_and_leaves_the_callers_rng_alone(llama, tmp_path):
    state = torch.random.get_rng_state()
    for name in ("first", "second"):
        hessquant.quantize(llama, tmp_path / name, hessquant.Config(group_size=32), calibration=[tokens()])
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_padding_on_either_side_and_none_give_the_same_bytes(llama, tmp_path):
    # CASES A5: lengths 5, 17, 33, 64; masked positions never enter a Hessian.
    samples = [tokens(1, n, seed=n)[0] for n in (5, 17, 33, 64)]
    ids, mask = torch.full((2, 4, 64), 3), torch.zeros(2, 4, 64, dtype=torch.int64)
    for index, sample in enumerate(samples):
        for side, place in enumerate((slice(0, len(sample)), slice(64 - len(sample), 64))):
            ids[side, index, place], mask[side, index, place] = sample, 1
    calibrations = {
        "plain": samples,
        "right": [{"input_ids": ids[0], "attention_mask": mask[0]}],
        "left": [{"input_ids": ids[1], "attention_mask": mask[1]}],
    }
    for name, calibration in calibrations.items():
        report = hessquant.quantize(llama, tmp_path / name, hessquant.Config(group_size=32), calibration=calibration)
        assert report.calibration.tokens == 119
        assert {layer.tokens for layer in report.layers} == {119}
    assert digests(tmp_path / "plain") == digests(tmp_path / "right") == digests(tmp_path / "left")


@pytest.mark.parametrize("tied", [True, False])
def test_biases_and_a_tied_head_come_out_as_they_went_in(tied, make_model, tmp_path):
    # CASES A7.
    model, out = make_model(Qwen2Config(**TINY, tie_word_embeddings=tied)), tmp_path / "out"
    hessquant.quantize(model, out, hessquant.Config(group_size=32), calibration=[tokens()])
    before, after = load_file(f"{model}/model.safetensors"), load_file(out / "model.safetensors")
    biases = {name for name in after if name.endswith(".bias")}
    assert biases == {name for name in before if name.endswith(".bias")}
    assert len(biases) == 6
    assert ("lm_head.weight" in after) == (not tied)
    for name in [*biases, "model.embed_tokens.weight", *(["lm_head.weight"] if not tied else [])]:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].view(torch.int16), before[name].view(torch.int16))
    assert json.loads((out / "config.json").read_text())["quantization_config"]["lm_head"] is False


def test_no_bias_is_invented(llama, tmp_path):
    hessquant.quantize(llama, tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if name.endswith("bias")]


def test_rows_and_groups_of_zeros_stay_zero_and_are_counted(llama, tmp_path):
    # CASES A6 through the whole job.
    state = load_file(f"{llama}/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    state[name][0:4] = 0
    state[name][4:8] *= 1e-4
    state[name][8, 32:64] = 0
    save_file(state, f"{llama}/model.safetensors", metadata={"format": "pt"})
    report = hessquant.quantize(llama, tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    layer = next(layer for layer in report.layers if layer.name == name)
    assert (layer.zero_groups, layer.tiny_groups) == (9, 0)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert (written["model.layers.0.mlp.up_proj.scales"] > 0).all()
    with CheckpointReader(tmp_path / "out") as reader:
        values = decoded_state(reader)[name]
    assert not values[0:4].any()
    assert not values[8, 32:64].any()
    assert values[4:8].any()


def test_a_tensor_that_the_model_class_does_not_know_is_copied_and_listed(llama, tmp_path):
    state = load_file(f"{llama}/model.safetensors")
    state["model.extra_head.weight"] = torch.randn(3, 5).to(torch.bfloat16)
    save_file(state, f"{llama}/model.safetensors", metadata={"format": "pt"})
    report = hessquant.quantize(llama, tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.extra_head.weight"], state["model.extra_head.weight"])
    listed = {tensor.name: tensor.reason for tensor in report.plan.untouched}
    assert "unknown to the model class" in listed["model.extra_head.weight"]


def test_a_bad_window_stops_the_run_and_leaves_no_checkpoint(llama, tmp_path, monkeypatch):
    # CASES A1: one NaN in window 7 of 16.
    def poisoned(*args):
        states = record_arguments(*args)
        state = next(state for state in states if 7 in state.windows)
        state.hidden[state.windows.index(7), 9, 11] = float("nan")
        return states

    monkeypatch.setattr("hessquant.run.loop.record_arguments", poisoned)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight.*window 7, token 9"):
        hessquant.quantize(llama, tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_weight_that_is_nan_is_refused_before_any_work(llama, tmp_path):
    state = load_file(f"{llama}/model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(state, f"{llama}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SourceError, match=r"safetensors: tensor model\.layers\.1\.mlp\.down_proj\.weight is nan at \[3, 4\]"
    ):
        hessquant.quantize(llama, tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    assert not list(tmp_path.glob("out*"))


def test_an_output_that_is_not_empty_is_refused_before_any_work(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"notes\.txt"):
        hessquant.quantize(llama, tmp_path / "out", calibration=[tokens()])
    assert not (tmp_path / "out.run").exists()


@pytest.mark.parametrize(
    ("step", "raised", "seen"),
    [
        ("pipeline.publishing.SafetensorsDraft.verify", VerificationError("x: differs"), VerificationError),
        ("pipeline.publishing.SafetensorsDraft.verify", MemoryError(), MemoryError),
        ("pipeline.publishing.to_html", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_whatever_fails_after_writing_the_checkpoint_is_withdrawn(step, raised, seen, llama, tmp_path, monkeypatch):
    def fail(*_):
        raise raised

    monkeypatch.setattr(f"hessquant.{step}", fail)
    with pytest.raises(seen):
        hessquant.quantize(llama, tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_plan_is_shown_before_work_and_every_weight_is_told(llama, tmp_path):
    class Watcher:
        def __init__(self):
            self.plans, self.stages, self.layers = [], [], []

        def plan(self, plan):
            self.plans.append((plan, (tmp_path / "out").exists()))

        def stage(self, name, steps):
            self.stages.append((name, steps))

        def advance(self, detail): ...

        def layer(self, record):
            self.layers.append(record.name)

    watcher = Watcher()
    report = hessquant.quantize(
        llama,
        tmp_path / "out",
        hessquant.Config(group_size=32),
        calibration=[tokens()],
        progress=watcher,
    )
    assert watcher.plans == [(report.plan, False)]
    assert watcher.layers == [target.name for target in report.plan.targets]
    assert ("quantize", 14) in watcher.stages
    assert report.plan == hessquant.make_plan(llama, hessquant.Config(group_size=32))


def test_the_public_names_are_sorted_and_all_there():
    assert list(hessquant.__all__) == sorted(hessquant.__all__)
    for name in hessquant.__all__:
        assert getattr(hessquant, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hessquant.nothing


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32])
def test_every_width_and_symmetry_is_written_verified_and_sound(bits, symmetric, group_size, llama, tmp_path):
    config = hessquant.Config(bits=bits, symmetric=symmetric, group_size=group_size)
    report = hessquant.quantize(llama, tmp_path / "out", config, calibration=[tokens()])
    assert report.verified_tensors == 14
    inspection = hessquant.inspect(tmp_path / "out")
    assert inspection.faults == ()
    assert {(weight.grid.bits, weight.grid.symmetric, weight.grid.group_size) for weight in inspection.weights} == {
        (bits, symmetric, group_size)
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32])
def test_compressed_tensors_are_written_verified_and_sound(bits, symmetric, group_size, llama, tmp_path):
    config = hessquant.Config(bits=bits, symmetric=symmetric, group_size=group_size, format="compressed-tensors")
    report = hessquant.quantize(llama, tmp_path / "out", config, calibration=[tokens()])
    assert report.verified_tensors == 14
    assert report.output_bytes == sum(tensor.numel() for tensor in written(tmp_path / "out").values())
    inspection = hessquant.inspect(tmp_path / "out")
    assert (inspection.format, inspection.faults) == ("pack-quantized", ())
    assert {(weight.grid.bits, weight.grid.symmetric, weight.grid.group_size) for weight in inspection.weights} == {
        (bits, symmetric, group_size)
    }
    assert not (tmp_path / "out" / "quantize_config.json").exists()


def test_both_dialects_hold_the_same_numbers(llama, tmp_path):
    for name in ("gptq", "compressed-tensors"):
        config = hessquant.Config(group_size=32, symmetric=False, format=name)
        hessquant.quantize(llama, tmp_path / name, config, calibration=[tokens()])
    assert torch.equal(logits(str(tmp_path / "gptq")), logits(str(tmp_path / "compressed-tensors")))


@pytest.mark.parametrize("order", ["natural", "group"])
def test_dynamic_scales_go_through_the_whole_job(order, llama, tmp_path):
    config = hessquant.Config(bits=3, group_size=32, order=order, scales="dynamic")
    report = hessquant.quantize(llama, tmp_path / "out", config, calibration=[tokens()])
    assert all(layer.method == "gptq" and layer.loss <= layer.rtn_loss for layer in report.layers)
    assert hessquant.inspect(tmp_path / "out").faults == ()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1] * 65], "65 tokens, but the model's context is 64"),
        ([[1, 97]], "token id 97, but the model's vocabulary is 97"),
    ],
)
def test_windows_that_the_model_was_not_made_for_are_refused_before_work(ids, message, make_model, tmp_path):
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=97, bos_token_id=1, eos_token_id=2)
    with pytest.raises(CalibrationError, match=message):
        hessquant.quantize(make_model(config), tmp_path / "out", hessquant.Config(group_size=32), calibration=ids)
    assert not (tmp_path / "out").exists()


def test_trust_in_the_models_code_reaches_the_probe_of_a_quantized_checkpoint(llama, tmp_path, monkeypatch):
    hessquant.quantize(llama, tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    asked = []

    def noting(source, *args, **others):
        asked.append(source.trust_remote_code)
        return probe(source, *args, **others)

    monkeypatch.setattr("hessquant.pipeline.evaluating.probe", noting)
    load_for_evaluation(resolve(str(tmp_path / "out"), trust_remote_code=True))
    assert asked == [True]


def test_serve_refuses_before_work_and_does_not_change_the_result(llama, tmp_path):
    config = {"group_size": 32}
    with pytest.raises(ServeError, match=r"vLLM 0\.32 \(CPU\): takes 4 bits, not 8"):
        hessquant.quantize(
            llama, tmp_path / "out", hessquant.Config(bits=8, serve=("vllm",), **config), calibration=[tokens()]
        )
    assert not list(tmp_path.glob("out*"))
    plain = hessquant.quantize(llama, tmp_path / "out", hessquant.Config(**config), calibration=[tokens()])
    served = hessquant.Config(serve=("vllm-cpu", "transformers"), **config)
    # Its own finished result: nothing is done again.
    again = hessquant.quantize(llama, tmp_path / "out", served, calibration=[tokens()])
    assert (again.run, again.layers, again.seconds) == (plain.run, plain.layers, plain.seconds)
    assert hessquant.make_plan(llama, served) == plain.plan

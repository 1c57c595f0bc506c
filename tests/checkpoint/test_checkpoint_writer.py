import errno
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig

from hessquant.checkpoint import output, writer
from hessquant.checkpoint.header import DTYPE_BYTES
from hessquant.checkpoint.output import RUN_MARK, refuse_output
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.writer import Unit, plan_shards, write_shard
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, OutputError
from hessquant.records import TensorInfo


def files_of(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def unit(name, size):
    return Unit(name, (TensorInfo(name, (size,), "U8", size, ""),))


def test_biases_and_the_tied_embedding_are_the_sources_and_no_head_is_invented(case):
    case.write()
    source, written = load_file(case.source / "model.safetensors"), load_file(case.out / "model.safetensors")
    assert "lm_head.weight" not in written
    biases = {name for name in source if name.endswith(".bias")}
    assert len(biases) == 6
    assert {name for name in written if name.endswith("bias")} == biases
    untouched = {*biases, "model.embed_tokens.weight", "model.norm.weight"}
    for name in untouched:
        assert written[name].dtype == source[name].dtype == torch.bfloat16
        assert torch.equal(written[name].view(torch.int16), source[name].view(torch.int16))
    assert json.loads((case.out / "config.json").read_text())["tie_word_embeddings"] is True


def test_every_target_is_replaced_by_its_parts_and_nothing_else_changes_its_name(case):
    case.write()
    written = set(load_file(case.out / "model.safetensors"))
    expected = {tensor.name for tensor in case.plan.untouched}
    for target in case.plan.targets:
        expected |= {target.name.replace("weight", part) for part in ("qweight", "qzeros", "scales", "g_idx")}
    assert written == expected


def test_a_written_checkpoint_verifies_in_one_or_many_shards(case, tmp_path):
    for directory, shard_bytes in ((tmp_path / "one", 1 << 30), (tmp_path / "many", 20_000)):
        case.out = directory
        size = case.write(shard_bytes=shard_bytes)
        assert case.verify() == 14
        with CheckpointReader(directory) as written:
            assert size == sum(info.bytes for info in written.tensors.values())
            files = {info.file for info in written.tensors.values()}
            assert len(files) == 1 or all(f.endswith(f"-of-{len(files):05d}.safetensors") for f in files)
    assert len(files) >= 3
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    assert not (tmp_path / "one/model.safetensors.index.json").exists()


def test_an_asymmetric_weight_with_a_zero_of_0_is_written_as_v2_and_verifies(make_asymmetric_case):
    case = make_asymmetric_case()
    first = case.quantized[case.plan.targets[0].name]
    first.grid.zeros[0, 0] = 0
    case.write()
    assert json.loads((case.out / "quantize_config.json").read_text())["checkpoint_format"] == "gptq_v2"
    assert case.verify() == 14


def test_each_shard_stays_below_the_limit_and_holds_whole_units():
    units = [unit("a", 6), unit("b", 4), unit("c", 1), unit("d", 30), unit("e", 5)]
    planned = plan_shards(units, 10)
    assert [[u.source for u in shard] for shard in planned.values()] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(planned) == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert list(plan_shards(units, 46)) == ["model.safetensors"]


def test_a_shard_is_readable_by_the_library_and_aligned(tmp_path):
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(5).to(torch.bfloat16),
        "whole": torch.randn(2, 3),
        "long": torch.tensor(7),
        "é": torch.empty(0, 2),
    }
    names = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
    units = [Unit(n, (TensorInfo(n, tuple(t.shape), names[t.dtype], t.nbytes, ""),)) for n, t in tensors.items()]
    path = tmp_path / "s.safetensors"
    write_shard(path, units, lambda u: tensors)
    read = load_file(path)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with safe_open(path, framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    content = path.read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    for entry in json.loads(content[8 : 8 + header_size]).values():
        if "dtype" in entry:
            assert entry["data_offsets"][0] % DTYPE_BYTES[entry["dtype"]] == 0


@pytest.mark.parametrize("length", range(1, 9))
def test_a_shards_data_begins_at_a_multiple_of_8(tmp_path, length):
    name, path = "n" * length, tmp_path / "s.safetensors"
    write_shard(path, [unit(name, 1)], lambda u: {name: torch.ones(1, dtype=torch.uint8)})
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert load_file(path)[name].tolist() == [1]


def test_a_tensor_that_is_not_as_planned_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"a: planned as U8 \[4\], but got torch.float32 \[1\]"):
        write_shard(tmp_path / "s.safetensors", [unit("a", 4)], lambda u: {"a": torch.ones(1)})
    assert files_of(tmp_path) == []


def test_one_tensor_at_a_time_is_asked_for(case):
    asked = []

    class Watched(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    case.quantized = Watched(case.quantized)
    case.write()
    assert sorted(asked) == sorted(case.quantized)


def test_sidecars_are_copied_byte_for_byte_and_weights_and_hidden_files_are_not(case):
    case.write()
    for name, content in case.sidecars.items():
        assert (case.out / name).read_bytes() == content
    assert (case.out / "generation_config.json").read_bytes() == (case.source / "generation_config.json").read_bytes()
    written = {"config.json", "generation_config.json", "model.safetensors", "quantize_config.json"}
    assert set(files_of(case.out)) == written | set(case.sidecars)
    assert set(case.left_behind) <= set(files_of(case.source))


def test_an_output_inside_the_source_is_not_copied_into_itself(case, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        (source / file).write_bytes((case.source / file).read_bytes())
    case.source, case.out = source, source / "quantized"
    case.write()
    assert files_of(case.out) == ["config.json", "model.safetensors", "quantize_config.json", "tokenizer.json"]


def test_the_config_is_the_sources_with_the_quantization_added_last(case):
    case.write()
    source = json.loads((case.source / "config.json").read_text())
    written = json.loads((case.out / "config.json").read_text())
    assert list(written) == [*source, "quantization_config"]
    assert written.pop("quantization_config") == json.loads((case.out / "quantize_config.json").read_text())
    assert written == source
    assert AutoConfig.from_pretrained(case.out).quantization_config["bits"] == 4


def test_the_same_input_gives_the_same_bytes(case, tmp_path):
    case.write(shard_bytes=20_000)
    first, case.out = case.out, tmp_path / "again"
    case.write(shard_bytes=20_000)
    assert files_of(first) == files_of(case.out)
    assert all((first / name).read_bytes() == (case.out / name).read_bytes() for name in files_of(first))


def test_config_comes_last_and_the_index_just_before(case, monkeypatch):
    order = []
    for module in (output, writer):
        original = module.replacing
        monkeypatch.setattr(
            module, "replacing", lambda path, original=original: order.append(path.name) or original(path)
        )
    case.write(shard_bytes=20_000)
    assert order[-2:] == ["model.safetensors.index.json", "config.json"]
    assert order.count("config.json") == 1
    assert order[0] == RUN_MARK
    assert order[1].startswith("model-00001-of-")
    assert not (case.out / RUN_MARK).exists()


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError),
    ],
)
def test_a_write_that_fails_in_shard_2_never_looks_complete(case, monkeypatch, failure, raised):
    write_tensor, begun = writer._write_tensor, set()

    def failing(stream, info, tensor):
        begun.add(stream.name)
        write_tensor(stream, info, tensor)
        if len(begun) == 2:
            raise failure

    monkeypatch.setattr(writer, "_write_tensor", failing)
    with pytest.raises(raised):
        case.write(shard_bytes=20_000)
    left = files_of(case.out)
    assert len(left) == 2
    assert left[0] == RUN_MARK
    assert left[1].startswith("model-00001-of-")
    refuse_output(case.out, "a run", 0)
    with pytest.raises(OutputError, match="is not empty"):
        refuse_output(case.out, "another run", 0)


def test_a_full_disk_is_named(case, monkeypatch):
    def full(stream, info, tensor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_write_tensor", full)
    with pytest.raises(CheckpointError, match=r"out: writing failed: No space left on device"):
        case.write()


def test_a_directory_with_anything_in_it_is_refused(tmp_path):
    refuse_output(tmp_path, "a run", 0)
    refuse_output(tmp_path / "not" / "yet", "a run", 0)
    (tmp_path / ".hidden").touch()
    with pytest.raises(OutputError, match=r"is not empty \(it holds \.hidden\)"):
        refuse_output(tmp_path, None, 0)
    with pytest.raises(OutputError, match="is a file"):
        refuse_output(tmp_path / ".hidden" / "out", "a run", 0)
    assert not (tmp_path / "not").exists()


def test_too_little_room_is_refused_before_writing(tmp_path):
    with pytest.raises(OutputError, match=r"1000000000000000000 bytes will be written to .*, but \d+ are free"):
        refuse_output(tmp_path / "out", "a run", 10**18)


def test_a_target_without_a_quantized_weight_is_refused_before_writing(case):
    missing = case.plan.targets[3].name
    del case.quantized[missing]
    with pytest.raises(CheckpointError, match=f"{missing}: .* no quantized weight"):
        case.write()
    assert not case.out.exists()


def test_a_weight_of_another_shape_than_planned_is_refused(case):
    name = case.plan.targets[0].name
    weight = case.quantized[name]
    case.quantized[name] = QuantizedWeight(
        weight.codes[:, :32], type(weight.grid)(weight.grid.spec, weight.grid.scales[:, :1], weight.grid.zeros[:, :1])
    )
    with pytest.raises(CheckpointError, match=r"qweight: planned as"):
        case.write()
    assert not (case.out / "config.json").exists()

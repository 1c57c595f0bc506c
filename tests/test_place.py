"""Only `place.py` names a device, and the rooms that compute make no tensor without saying where."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hessquant
from hessquant.errors import PlanError
from hessquant.models.source import ModelSource
from hessquant.place import HOST, Place, device_memory, find_device

PACKAGE = Path(hessquant.__file__).parent
DEVICES = {"cpu", "meta", "cuda", "xpu", "mps", "hip", "npu", "privateuseone"}
FACTORIES = {
    "arange",
    "empty",
    "empty_strided",
    "eye",
    "from_numpy",
    "full",
    "linspace",
    "ones",
    "rand",
    "randn",
    "tensor",
}
FACTORIES |= {"zeros", "randint", "as_tensor"}
COMPUTING = ("capture", "core", "kernels", "run")
"""Rooms whose tensors live where the model runs."""

# NumPy arrays are where this kernel works; `kernels.dispatch` sees that its tensors are there.
ON_THE_HOST = {"kernels/cpu.py"}
# What these say of float32 is about files, or about the arithmetic of the method; no model computes in it.
OF_FORMATS_AND_ARITHMETIC = ("checkpoint/", "core/", "formats/", "kernels/", "capture/collect.py", "run/solve.py")

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def faults_in(code: str, name: str) -> list[str]:
    """What a module says of places that it has no business to say, as "line: what"."""
    faults = []
    tree = ast.parse(code)
    keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    for node in ast.walk(tree):
        said = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in keys:
            said = repr(node.value) if node.value.partition(":")[0] in DEVICES else None
        elif isinstance(node, ast.Attribute):
            if node.attr in ("cpu", "cuda", "xpu"):
                said = f".{node.attr}"
            elif node.attr == "float32" and not name.startswith(OF_FORMATS_AND_ARITHMETIC):
                said = "float32"
        elif isinstance(node, ast.Call) and name.split("/")[0] in COMPUTING and name not in ON_THE_HOST:
            made = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch"
            if made and node.func.attr in FACTORIES and "device" not in {keyword.arg for keyword in node.keywords}:
                said = f"torch.{node.func.attr} without a device"
        if said is not None:
            faults.append(f"{node.lineno}: {said}")
    return faults


@pytest.mark.parametrize("name", FILES)
def test_no_module_lets_products_be_rounded_otherwise(name):
    # Such as to TF32. They are settings of the whole process, and whoever embeds us has them as they were.
    code = (PACKAGE / name).read_text(encoding="utf-8")
    settings = "tf32", "matmul_precision", "fp32_precision", "fp16_accumulation", "reduced_precision", "autocast"
    assert not [setting for setting in settings if setting in code.lower()]


@pytest.mark.parametrize("name", [name for name in FILES if name != "place.py"])
def test_no_module_but_place_names_a_device(name):
    assert faults_in((PACKAGE / name).read_text(encoding="utf-8"), name) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('x.to("cpu")', "models/a.py"),
        ('x.to("cuda:1")', "models/a.py"),
        ("x.cpu()", "formats/a.py"),
        ("x.to(torch.float32)", "evaluation.py"),
        ("torch.zeros(3)", "core/a.py"),
        ("torch.tensor([1])", "run/a.py"),
    ],
)
def test_the_check_sees_what_it_is_for(code, name):
    assert len(faults_in(code, name)) == 1


def test_the_check_lets_pass_what_follows_its_inputs():
    assert faults_in("torch.zeros(3, device=x.device, dtype=torch.float32)", "core/a.py") == []


def test_auto_takes_an_accelerator_where_torch_has_one(accelerator):
    assert find_device("auto") == find_device("pretend") == find_device("pretend:0") == accelerator.device
    assert find_device("cpu") == find_device("cpu:0") == HOST.device
    assert str(Place(accelerator.device, torch.bfloat16)) == "pretend, bfloat16"


def test_auto_is_the_host_where_torch_has_no_accelerator():
    assert find_device("auto") == find_device("cpu") == HOST.device
    assert str(HOST) == "cpu, float32"
    assert device_memory(HOST.device) == 0


def test_auto_passes_by_an_accelerator_that_cannot_factor(accelerator, monkeypatch):
    monkeypatch.setattr("hessquant.place._WITHOUT_FLOAT64", ("pretend",))
    assert find_device("auto") == HOST.device
    with pytest.raises(PlanError, match=r"device pretend has no float64.*take cpu"):
        find_device("pretend")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("cuda", "device cuda: torch sees none on this machine; here there are auto, cpu, pretend"),
        ("meta", "device meta: torch sees none"),
        ("pretend:1", "device pretend:1: this machine has 1 of them, numbered from 0"),
        ("gpu", "device 'gpu' is none that torch has a name for; here there are auto, cpu, pretend"),
        ("", "device '' is none"),
        (None, "device None is none"),
    ],
)
def test_a_device_that_is_not_there_is_refused(accelerator, asked, message):
    with pytest.raises(PlanError, match=message):
        find_device(asked)


def test_a_plan_is_refused_for_a_device_that_is_not_there():
    with pytest.raises(PlanError, match="device cuda: torch sees none on this machine; here there are auto, cpu"):
        hessquant.make_plan("nowhere", hessquant.Config(device="cuda"))


@pytest.mark.parametrize(
    ("stored", "asked", "on_host", "on_device"),
    [
        ("bfloat16", "auto", torch.float32, torch.bfloat16),
        ("float16", "auto", torch.float32, torch.float16),
        ("float32", "auto", torch.float32, torch.float32),
        ("bfloat16", "float32", torch.float32, torch.float32),
        ("bfloat16", "source", torch.bfloat16, torch.bfloat16),
        ("float32", "source", torch.float32, torch.float32),
    ],
)
def test_a_model_computes_in_what_its_device_likes(stored, asked, on_host, on_device, accelerator, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "dtype": "{stored}"}}')
    source = ModelSource("tiny", tmp_path, forward_dtype=asked)
    assert source.place == Place(HOST.device, on_host)
    assert replace(source, device=accelerator.device).place == Place(accelerator.device, on_device)

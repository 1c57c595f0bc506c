"""Only `place.py` names a device, and the rooms that compute make no tensor without saying where."""

import ast
from pathlib import Path

import pytest

import hessquant

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

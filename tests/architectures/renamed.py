"""Every class whose checkpoints name weights otherwise than the class does: what its config says, as clients read it.

    python tests/architectures/renamed.py                # all of them, about twenty minutes
    python tests/architectures/renamed.py mixtral        # some

Each is quantized as it is by default, with its last block left in 16 bit, and with other groups in its first, in both
formats; clients' own rules (`tests.readers`) and `inspect` look at every module.
"""

import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

if __name__ == "__main__":  # run as a file, tests/ is no package
    sys.path.insert(0, str(Path(__file__).parents[2]))
from safetensors import safe_open
from tests.architectures.families import CAUSAL_LM, NOT_BUILT, OTHERS, build, text_ids, tiny
from tests.architectures.naming import config_faults

import hessquant
from hessquant.errors import HessquantError
from hessquant.records import Plan

FORMATS = ("gptq", "compressed-tensors")


def save(name: str, folder: Path) -> tuple[Path, bool]:
    """A tiny model of a family or class, and whether its checkpoint has names that the class has not."""
    other = next((other for other in OTHERS if other.class_name == name), None)
    model = build(tiny(other.model_type if other else name), other.class_name if other else None)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return folder, not set(file.keys()) <= set(model.state_dict())


def asked_of(plan: Plan) -> dict[str, dict[str, object]]:
    """Nothing; a block left in 16 bit; a block with groups of its own."""
    ends = (0, max(target.block for target in plan.targets))
    first, last = ([target.name for target in plan.targets if target.block == block] for block in ends)
    return {
        "default": {},
        "excluded": {"exclude": tuple(last)},
        "overridden": {"overrides": tuple(hessquant.Override(pattern=name, group_size=16) for name in first)},
    }


def faults(model: Path, output_format: str, folder: Path) -> list[str]:
    """What some client reads wrongly of the checkpoints that are made of a model, or `inspect` finds."""
    settings = {"group_size": 32, "max_unquantized": 1.0, "format": output_format}
    settings |= {"scale_search": False, "refinement_rounds": 0}  # names do not depend on the numbers
    plan = hessquant.make_plan(str(model), hessquant.Config(**settings))
    found = []
    for title, asked in asked_of(plan).items():
        if title == "excluded" and len({target.block for target in plan.targets}) == 1:
            continue
        out = folder / f"{output_format}-{title}"
        hessquant.quantize(str(model), out, hessquant.Config(**settings, **asked), calibration=[text_ids(length=64)])
        inspected = hessquant.inspect(out)
        found += [f"{title}: {fault}" for fault in (*config_faults(model, out), *inspected.faults)]
    return found


def look_at(name: str) -> str:
    """What came of one class, in a line; empty where its names are the class's own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model, is_renamed = save(name, Path(folder) / "model")
            if not is_renamed:
                return ""
            found = [fault for output_format in FORMATS for fault in faults(model, output_format, Path(folder))]
            return f"{name}: {found[0] if found else 'sound'}"
        except HessquantError as error:
            return f"{name}: refused: {str(error).splitlines()[0].replace(folder, '')}"
        except Exception as error:  # a class must not end the run
            return f"{name}: {type(error).__name__}: {str(error).splitlines()[0].replace(folder, '')}"


def main() -> None:
    """Run from the command line."""
    known = [name for name in CAUSAL_LM if name not in NOT_BUILT] + [other.class_name for other in OTHERS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for line in filter(None, pool.map(look_at, sys.argv[1:] or known)):
            print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

"""Every model family, quantized: which matrices, how well, and whether the result opens again.

    python tests/architectures/cover.py                        # all of them, and docs/architectures.md
    python tests/architectures/cover.py mixtral gpt_oss        # some, a line each

Each is a tiny model with random weights, quantized to 4 bits in groups of 32 on random tokens.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

if __name__ == "__main__":  # run as a file, tests/ is no package
    sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.loading import load_model
from tests.architectures.families import CAUSAL_LM, NOT_BUILT, build, tiny
from tests.architectures.others import OTHERS, Other
from tests.architectures.shrink import VOCABULARY
from torch import Tensor, nn

import hessquant
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.unpacked import UnpackedCheckpoint
from hessquant.errors import HessquantError
from hessquant.models.library import run_model
from hessquant.models.source import resolve
from hessquant.records import Plan, Target
from hessquant.results import RunReport

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
CONFIG = hessquant.Config(group_size=32, max_unquantized=1.0)

# 4 bits in groups of 32 leave about 8 % of a Gaussian weight; a matrix read along the wrong axis would leave 140 %.
_LARGEST_WEIGHT_ERROR = 0.25
_LARGEST_LOGIT_ERROR = 1e-3


@dataclass(frozen=True)
class Row:
    """What became of one family.

    Attributes:
        family: Its model_type, with the class where that is not its causal language model.
        whole: Why its blocks are not run one by one; empty if they are.
        targets: Quantized matrices.
        experts: Of these, matrices of stacked experts.
        left: Share of the weights' bytes in 16 bit, embeddings and head apart.
        ratio: Loss on the calibration inputs, relative to round-to-nearest's.
        logits: Distance of the outputs from the original's, relative to these.
        fault: What is wrong; empty if nothing is.
    """

    family: str
    whole: str = ""
    targets: int = 0
    experts: int = 0
    left: float = 0.0
    ratio: float = 0.0
    logits: float = 0.0
    fault: str = ""


def cover(family: str | Other, folder: Path) -> Row:
    """Quantize one family and look at everything that comes out; raises AssertionError where it is wrong."""
    other = family if isinstance(family, Other) else None
    name = family if other is None else f"{other.model_type} ({other.class_name})"
    config = tiny(other.model_type if other else family)
    model = build(config, other.class_name if other else None)
    model.save_pretrained(folder / "model")
    seen = _multiplied(model, _inputs(config, other, 0))
    report = hessquant.quantize(str(folder / "model"), folder / "out", CONFIG, calibration=_calibration(config, other))
    plan = report.plan
    row = Row(
        str(name),
        whole=plan.whole,
        targets=len(plan.targets),
        experts=sum(bool(target.module) for target in plan.targets),
        left=plan.unquantized_matrices,
        ratio=_ratio(report),
    )
    _check_accounted(plan, seen)
    _check_weights(folder, plan, model)
    assert row.ratio < 1, f"the loss is {row.ratio:.3f} of round-to-nearest's"
    inputs = _inputs(config, other, 1)
    loaded = load_model(resolve(str(folder / "out")), None if other is None else inputs)
    # `model` holds what our decoder made of each matrix, put where it was.
    expected, found = _output(model, inputs), _output(loaded, inputs)
    error = float((found - expected).norm() / expected.norm())
    assert error < _LARGEST_LOGIT_ERROR, f"reloaded, its outputs are {error:.2g} off"
    original = _output(build(config, other.class_name if other else None), inputs)
    return replace(row, logits=float((found - original).norm() / original.norm()))


def _inputs(config: object, other: Other | None, seed: int) -> dict[str, Tensor]:
    if other is not None:
        return other.inputs(config)
    return {"input_ids": _tokens(1, 16, seed)}


def _calibration(config: object, other: Other | None) -> list[object]:
    if other is None or set(other.inputs(config)) <= {"input_ids", "decoder_input_ids"}:
        return [_tokens(24, 32, 2)]
    return [other.inputs(config)]


def _tokens(windows: int, length: int, seed: int) -> Tensor:
    return torch.randint(16, VOCABULARY - 32, (windows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output = run_model(model, inputs)
    return (output.logits if "logits" in output else output[0]).double()


def _ratio(report: RunReport) -> float:
    return sum(layer.loss for layer in report.layers) / sum(layer.rtn_loss for layer in report.layers)


@torch.no_grad()
def _multiplied(model: nn.Module, inputs: dict[str, Tensor]) -> set[str]:
    """Weights of linear layers that run, by hooks: another way of looking than the planner's."""
    seen: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _, _args, name=name: seen.add(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    run_model(model, inputs)
    for hook in hooks:
        hook.remove()
    return seen


def _check_accounted(plan: Plan, multiplied: set[str]) -> None:
    """Whatever the forward pass multiplies by is a target, or stays behind for a reason that is true."""
    taken = {location.parameter for target in plan.targets for location in target.locations}
    reasons = {tensor.name: tensor.reason for tensor in plan.untouched}
    assert all(reasons.values())
    for name in multiplied - taken:
        reason = reasons.get(name, "")
        assert not reason.startswith(("not multiplied", "unknown to the model")), f"{name} is multiplied, not {reason}"


@torch.no_grad()
def _check_weights(folder: Path, plan: Plan, model: nn.Module) -> None:
    """Decoded matrices are near the source's, as it stores them; they take their location in `model`."""
    parameters = dict(model.named_parameters())
    with CheckpointReader(folder / "model") as source, CheckpointReader(folder / "out") as out:
        unpacked = UnpackedCheckpoint(out)
        for target in plan.targets:
            decoded = unpacked.decode(target.name)
            stored = decoded.T if target.transposed else decoded
            if target.part_of:
                matrix = source.read(target.part_of)[target.locations[0].piece].float()
                original = _own_rows(matrix, target, stored)
            else:
                original = source.read(target.name).float()
            error = float((stored - original).norm() / original.norm())
            assert error < _LARGEST_WEIGHT_ERROR, f"{target.name} is {error:.2f} off in the stored orientation"
            for location in target.locations:
                matrix = parameters[location.parameter]
                matrix = matrix[location.piece] if location.stacked else matrix
                matrix = matrix.T if location.transposed else matrix
                rows = decoded[location.to_row :: location.to_step][: location.rows]
                matrix[location.first_row :: location.row_step][: location.rows].copy_(rows)


def _own_rows(matrix: Tensor, target: Target, stored: Tensor) -> Tensor:
    """Those rows of an expert's matrix in the source that a target has; others hold the other half of it."""
    upright = matrix.T if target.transposed else matrix
    if len(target.locations) > 1:
        # The model has them in another order than the source, where they are one after another: one half, or the other.
        halves = [half.T if target.transposed else half for half in upright.split(target.rows)]
        return min(halves, key=lambda half: float((half - stored).norm()))
    location = target.locations[0]
    rows = upright[location.first_row :: location.row_step][: location.rows]
    return rows.T if target.transposed else rows


def run(family: str | Other) -> Row:
    """`cover`, with whatever goes wrong as a row."""
    name = family if isinstance(family, str) else f"{family.model_type} ({family.class_name})"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return cover(family, Path(folder))
        except HessquantError as error:
            return Row(name, fault=f"refused: {str(error).replace(folder, '')}")
        except Exception as error:  # a family must not end the run
            if os.environ.get("TRACE"):
                traceback.print_exc()
            return Row(name, fault=f"{type(error).__name__}: {str(error).replace(folder, '')}")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    known: dict[str, str | Other] = {name: name for name in CAUSAL_LM if name not in NOT_BUILT}
    known |= {f"{other.model_type}:{other.class_name}": other for other in OTHERS}
    chosen = [known[name] for name in asked.families] if asked.families else list(known.values())
    rows = []
    start = time.monotonic()
    with ProcessPoolExecutor(asked.workers) as pool:
        for row in pool.map(run, chosen):
            rows.append(row)
            print(f"{row.family}: {row.fault.splitlines()[0] if row.fault else _good(row)}", flush=True)  # noqa: T201
    failed = sum(bool(row.fault) for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} families, {time.monotonic() - start:.0f} s")  # noqa: T201
    if not asked.families:
        from tests.architectures.page import written

        PAGE.write_text(written(rows), encoding="utf-8")


def _good(row: Row) -> str:
    kind = "as one" if row.whole else "by block"
    return f"{row.targets} matrices {kind}, {row.left:.0%} left, loss {row.ratio:.2f}, outputs {row.logits:.2f} off"


if __name__ == "__main__":
    main()

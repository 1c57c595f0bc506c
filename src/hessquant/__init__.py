"""Post-training weight quantization by GPTQ, for checkpoints that servers open.

report = hessquant.quantize("path/to/model", "out", hessquant.Config(bits=4))
print(hessquant.evaluate("out", against="path/to/model").perplexity)
solution = hessquant.solve(weight, hessian, hessquant.Config(bits=4, group_size=64))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hessquant.config import Config, Override

if TYPE_CHECKING:
    from hessquant.kernels.dispatch import solve
    from hessquant.pipeline import evaluate, export, inspect, make_plan, quantize

__version__ = "0.1.0"

__all__ = ["Config", "Override", "__version__", "evaluate", "export", "inspect", "make_plan", "quantize", "solve"]

_HOMES = {
    "evaluate": "hessquant.pipeline",
    "export": "hessquant.pipeline",
    "inspect": "hessquant.pipeline",
    "make_plan": "hessquant.pipeline",
    "quantize": "hessquant.pipeline",
    "solve": "hessquant.kernels.dispatch",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for, so that `hessquant --help` need not wait."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hessquant' has no attribute {name!r}")

"""Post-training weight quantization by GPTQ, for checkpoints that servers open.

report = hessquant.quantize("path/to/model", "out", hessquant.Config(bits=4))
print(hessquant.evaluate("out", against="path/to/model").perplexity)
solution = hessquant.solve(weight, hessian, hessquant.Config(bits=4, group_size=64))
"""

# Nothing is imported here, not even `typing`: the command line handles signals only after this module has run.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from hessquant.config import Config, Override
    from hessquant.kernels.dispatch import solve
    from hessquant.pipeline import evaluate, export, inspect, make_plan, quantize

__version__ = "0.1.0"

__all__ = ["Config", "Override", "__version__", "evaluate", "export", "inspect", "make_plan", "quantize", "solve"]

_HOMES = {
    "Config": "hessquant.config",
    "Override": "hessquant.config",
    "evaluate": "hessquant.pipeline",
    "export": "hessquant.pipeline",
    "inspect": "hessquant.pipeline",
    "make_plan": "hessquant.pipeline",
    "quantize": "hessquant.pipeline",
    "solve": "hessquant.kernels.dispatch",
}


def __getattr__(name: str) -> object:
    """Import what a name needs when it is first asked for: most need torch, and `hessquant --help` should not wait."""
    if name in _HOMES:
        from importlib import import_module

        value: object = getattr(import_module(_HOMES[name]), name)
        return value
    raise AttributeError(f"module 'hessquant' has no attribute {name!r}")

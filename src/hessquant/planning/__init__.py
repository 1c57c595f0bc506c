"""Planning: what will be quantized, how, and who will open the result. No weights are read."""

from hessquant.planning.plan import make_plan

__all__ = ["make_plan"]

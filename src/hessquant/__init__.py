"""Post-training weight quantization by GPTQ, for checkpoints that servers open."""

__version__ = "0.1.0"

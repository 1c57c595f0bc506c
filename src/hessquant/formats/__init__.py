"""On-disk dialects of quantized weights, one file per dialect."""

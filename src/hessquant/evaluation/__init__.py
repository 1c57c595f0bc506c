"""Perplexity, KL divergence and top-1 agreement of causal language models."""

"""vLLM's OpenAI-compatible server, with `vllm_product` where this CPU needs it; takes the server's arguments."""

import runpy

import vllm_product

# Also when a process that the server starts imports this file anew.
vllm_product.install_if_missing()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

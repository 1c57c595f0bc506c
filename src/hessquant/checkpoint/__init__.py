"""Reading shards lazily; writing shards, index and config; verifying and inspecting what was written."""

"""Beam search in vLLM's engine core: scheduling, KV blocks and answers. A beam group is one request to vLLM."""

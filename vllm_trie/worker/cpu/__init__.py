"""vLLM's Model Runner V2 on CPUs that have no Triton compiler: torch and numpy in place of its Triton kernels.

Goes as soon as vLLM has such kernels itself.
"""

"""vLLM's Model Runner V2 on CPUs without a Triton compiler: torch and numpy functions in place of its Triton kernels.

To be removed once vLLM has such kernels itself.
"""

"""What runs in place of vLLM's Triton kernels on a CPU, against these kernels in Triton's interpreter."""

"""Triton kernels that grow forests; each must equal a function in torch."""

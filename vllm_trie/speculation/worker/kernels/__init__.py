"""Triton kernels that grow forests; for each there is a function in torch that it must equal."""

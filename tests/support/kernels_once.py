"""Imported, lets vLLM's CPU workers look for kernels to replace once.

They look through all modules, and wrap those again that have been wrapped. Modules that are imported later take what is
replaced already.
"""

from __future__ import annotations

from functools import cache

from vllm.platforms.cpu import CpuPlatform

find = cache(CpuPlatform.register_triton_kernel_overrides)
CpuPlatform.register_triton_kernel_overrides = staticmethod(find)
find()

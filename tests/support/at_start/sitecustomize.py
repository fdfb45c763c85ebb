"""Python runs this at the start of processes that tests start, which find this folder on their PYTHONPATH.

To import vLLM makes so many objects that a sixth of its time goes to looking for garbage among them.
"""

import gc

gc.set_threshold(100_000, 20, 20)

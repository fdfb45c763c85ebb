"""Search by steps: a beam is a text of several steps, each drawn by an ordinary request, and scored.

`search.py` decides which candidates go on, and `request.py` makes their requests. `offline.py` and `online.py` are the
hooks that take such searches in (see `entrypoints.output_hooks`).
"""

"""Search by steps: a beam is a text of several steps, each sampled by an ordinary request and then scored.

`search.py` decides which candidates go on, and `request.py` makes their requests. `offline.py` and `online.py` are the
hooks that handle such requests (see `entrypoints.output_hooks`).
"""

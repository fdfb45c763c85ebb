"""Lets a worker load its engine's catalogs, at its start and when it is told to."""

from __future__ import annotations

from typing import Any

from vllm_trie.selection import config_of


class TakesCatalogs:
    """A worker that is told to load catalogs, see `vllm_trie.engine.catalogs`."""

    model_runner: Any

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, and then the engine's catalogs: beside its weights, which `sleep` may discard.

        Profiling counts their memory, as it comes later.
        """
        super().load_model(**kwargs)  # type: ignore[misc]
        vllm_config = self.model_runner.vllm_config
        for path in config_of(vllm_config).catalogs.values():
            self.model_runner.catalogs.load_first(path, vllm_config.model_config.get_vocab_size())

    def load_catalog(self, name: str, path: str, digest: str) -> str:
        """Load a file for a name, which the scheduler alone knows, if its digest is this one. Returns what it is."""
        return str(self.model_runner.catalogs.load(path, digest))

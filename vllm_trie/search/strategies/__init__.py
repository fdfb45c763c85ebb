"""How the next beams are chosen among all continuations, one file per strategy; see `vllm_trie.search.step`."""

"""How the next beams are chosen among all continuations: each way is one file here, see `vllm_trie.search.step`."""

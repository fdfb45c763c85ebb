"""`python -m vllm_trie.mend`: repairs an installation on a CPU. Engines load nothing of it."""

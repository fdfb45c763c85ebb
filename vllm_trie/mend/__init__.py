"""`python -m vllm_trie.mend`: a tool of the set-up, of which nothing is loaded where beams run."""

"""The entry point of `python -m vllm_trie.mend`."""

from vllm_trie.mend.cpu_build import main

if __name__ == "__main__":
    main()

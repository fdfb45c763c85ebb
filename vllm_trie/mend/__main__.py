"""See `cpu_build.py`."""

from vllm_trie.mend.cpu_build import main

if __name__ == "__main__":
    main()

"""`python -m vllm_trie.entrypoints.batch`: runs a batch job of `vllm_trie.batch`."""

from pkgutil import resolve_name

if __name__ == "__main__":
    resolve_name("vllm_trie.batch.__main__:main")()

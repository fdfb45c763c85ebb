# vLLM's CPU build and the plugin, set up as `make demo` does it.
#   docker build -f docker/cpu.Dockerfile -t vllm-trie-cpu .
#   docker run -p 8000:8000 vllm-trie-cpu MODEL --kv-cache-memory-bytes 4294967296
FROM python:3.11-slim-bookworm

# A compiler for kernels that are made when an engine starts, and a library that vLLM's are linked with.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/vllm_trie
COPY . .
RUN python3 tools/set_up.py .venv
ENV PATH=/opt/vllm_trie/.venv/bin:$PATH VLLM_PLUGINS=trie_beam
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]

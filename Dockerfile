# vLLM's own image with the plugin in it: beams in every engine that it starts.
#   docker build -t vllm-trie .
#   docker run --gpus all --ipc host -p 8000:8000 vllm-trie --model MODEL
ARG VLLM_VERSION=0.33.0
FROM vllm/vllm-openai:v${VLLM_VERSION}

COPY . /opt/vllm_trie
RUN uv pip install --system --no-cache /opt/vllm_trie \
    && python3 /opt/vllm_trie/tools/check_vllm.py \
    && rm -r /opt/vllm_trie
ENV VLLM_PLUGINS=trie_beam

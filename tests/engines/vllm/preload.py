"""What every engine's process has loaded already when it begins: vLLM, in a process that only forks.

Importing vLLM takes eight seconds, which would otherwise be spent at each of some thirty starts.
"""

from __future__ import annotations

import os

os.environ.update(
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="kvstore",
)

import vllm
import vllm.model_executor.models.llama
import vllm.v1.engine.core_client
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker

LLM = vllm.LLM  # imported when it is first used

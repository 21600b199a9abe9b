"""What names the chunks of vLLM's own offloading: their namespaces, and the options of a tier.

A chunk's key is vLLM's hash over its tokens and all before them, with salt and media. What that leaves
out must be in the namespace: the weights, the settings, and all that decides the bytes of a row.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig

from engine_plugin.vllm.connector import check_speculation, minor_version
from engine_plugin.vllm.options import check_names, parse_options
from engine_plugin.vllm.prompts import engine_settings, model_digest
from kvstore.errors import UsageError
from kvstore.namespace import MAX_BLOCK_TOKENS, KVLayout, Namespace, framed_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_offload.config import OffloadingConfig

    from engine_plugin.vllm.options import Options

TIER_OPTIONS = ("url", "model_digest", "tenant")
"""Those of :class:`engine_plugin.vllm.options.Options` that mean something for a tier."""
HASHES = ("sha256", "sha256_cbor")
"""Values of ``--prefix-caching-hash-algo`` whose hashes are long enough to stand for tokens: 32 bytes."""


def parse_tier_options(given: Mapping[str, Any]) -> Options:
    """Return the options of a tier's entry in ``secondary_tiers``.

    Raises:
        ConfigError: an unknown name (with the one that was probably meant) or an impossible value.
    """
    check_names(given, TIER_OPTIONS, "the tier 'kvstore' has no option")
    return parse_options(given)


def config_of_caller() -> VllmConfig:
    """Return the configuration of the engine that is being made.

    vLLM does not hand it to a tier, which is told the model's name but not its revision, dtype or
    overrides. It is a local variable of the constructors of vLLM that lead here.

    Raises:
        UsageError: it is not.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if isinstance(found, VllmConfig):
            return found
        frame = frame.f_back
    raise UsageError("this version of vLLM does not tell which model it runs: use KVStoreConnector")


def make_namespaces(
    vllm_config: VllmConfig, config: OffloadingConfig, chunk_bytes: int, options: Options
) -> dict[int, Namespace]:
    """Return the namespace of each group's chunks.

    Raises:
        UsageError: they cannot be stored; says why.
    """
    check_set_up(vllm_config)
    model, settings = model_digest(vllm_config, options), engine_settings(vllm_config)
    namespaces = {}
    for group in config.groups:
        layout = _layout(vllm_config, config, chunk_bytes, group)
        namespaces[group.group_id] = Namespace(
            model, layout, settings=settings, tenant=options.tenant, keys="hash"
        )
    return namespaces


def check_set_up(vllm_config: VllmConfig) -> None:
    """Raise :class:`UsageError` for what vLLM's hashes do not tell apart, saying what it is."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASHES:
        raise UsageError(
            f"hashes of {algorithm} are too short to stand for tokens: use --prefix-caching-hash-algo "
            f"{HASHES[1]}"
        )
    if vllm_config.lora_config is not None:
        raise UsageError("vLLM's hashes know adapters by name only: use KVStoreConnector with LoRA")
    check_speculation(vllm_config)


def _layout(
    vllm_config: VllmConfig, config: OffloadingConfig, chunk_bytes: int, group: Any
) -> KVLayout:
    """Return the layout of a group's chunks: bytes as vLLM's workers write them, named by all that decides."""
    tokens = group.tokens_per_block * config.cache.blocks_per_chunk
    if chunk_bytes % tokens or tokens > MAX_BLOCK_TOKENS:  # rows end on a page of memory
        tokens = 1
    parts = (
        minor_version(),
        _device(),
        str(vllm_config.model_config.dtype),
        config.model.dtype,
        str(config.kv_cache_layout),
        str(config.canonical_layout),
        str(config.replicated_layout),
        vllm_config.attention_config.compute_hash(),
        str(vllm_config.use_v2_model_runner),
        *_ranks(config),
        config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        config.cache.tokens_per_hash,
        config.cache.blocks_per_chunk,
        group.group_id,
        group.tokens_per_block,
        *(part for one in config.groups for part in (len(one.layer_names), *one.layer_names)),
    )
    return KVLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=chunk_bytes // tokens,
        dtype="uint8",
        block_tokens=tokens,
        attention="mla",
        opaque=f"vllm-chunk:{framed_digest(*parts).hex()}",
    )


def _ranks(config: OffloadingConfig) -> tuple[int, ...]:
    """Return how the ranks share a row; vLLM's canonical layout may be the same for all."""
    ranks = config.parallel
    if config.canonical_layout and ranks.is_parallelism_agnostic:
        return (1, 1, 1, 1, 1)
    return (ranks.world_size, ranks.tp_size, ranks.pp_size, ranks.pcp_size, ranks.dcp_size)


def _device() -> str:
    """Return what vLLM chooses kernels by, and with them the order of bytes within a block."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        amx = torch.cpu.get_capabilities().get("amx_bf16", False)
        return f"cpu:{torch.backends.cpu.get_cpu_capability()}:{amx}"
    return f"{current_platform.device_type}:{current_platform.get_device_name()}"

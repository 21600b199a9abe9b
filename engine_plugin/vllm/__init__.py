"""vLLM: a KV connector over a daemon of this host, and a secondary tier for vLLM's own offloading.

vLLM finds :func:`register` by its entry point ``vllm.general_plugins`` and calls it in every process.
:mod:`engine_plugin.vllm.connector` and :mod:`engine_plugin.vllm.tier` say what they do there.
"""

from __future__ import annotations

from contextlib import suppress

CONNECTOR = "KVStoreConnector"
TIER = "kvstore"


def register() -> None:
    """Make both known to vLLM; a second call changes nothing.

    They are ``"kv_connector": "KVStoreConnector"``, and ``"type": "kvstore"`` among the
    ``secondary_tiers`` of vLLM's ``TieringOffloadingSpec``.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except ValueError:
        KVConnectorFactory.register_connector(CONNECTOR, "engine_plugin.vllm.connector", CONNECTOR)
    with suppress(ValueError):  # registered before
        SecondaryTierFactory.register_tier(TIER, "engine_plugin.vllm.tier", "KVStoreTier")

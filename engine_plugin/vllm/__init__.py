"""vLLM: a KV connector over a daemon of this host, and a secondary tier for vLLM's own offloading.

vLLM finds :func:`register` by its entry point ``vllm.general_plugins`` and calls it in every process.
:mod:`engine_plugin.vllm.connector` says what it does there.
"""

from __future__ import annotations

CONNECTOR = "KVStoreConnector"


def register() -> None:
    """Make ``"kv_connector": "KVStoreConnector"`` known to vLLM; a second call changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except ValueError:
        KVConnectorFactory.register_connector(CONNECTOR, "engine_plugin.vllm.connector", CONNECTOR)

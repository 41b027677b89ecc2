"""The vLLM connector: `kv_connector="KvServiceConnector"` in vLLM's `--kv-transfer-config`."""


def register() -> None:
    """Make the connector known to vLLM by name (entry point `vllm.general_plugins`).

    vLLM calls this in each of its processes. Idempotent.
    """
    from kvplugins.vllm.compat import register_connector

    register_connector("KvServiceConnector", "kvplugins.vllm.connector", "KvServiceConnector")

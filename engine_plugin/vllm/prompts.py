"""What of a vLLM request decides its keys and values: the namespace, and the key bytes of its blocks."""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_plugin.checkpoint import adapter_digest, weights_digest
from engine_plugin.fingerprint import settings_digest
from engine_plugin.vllm.options import cache_file
from kvstore.errors import UsageError
from kvstore.namespace import Namespace, framed_digest
from kvstore.tokens import MediaSpan, block_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    from engine_plugin.vllm.options import Options
    from kvstore.namespace import KVLayout

logger = logging.getLogger("vllm.kvstore")

FROM_SEED = "dummy"
FROM_FILES = frozenset({"auto", "hf", "safetensors", "mistral", "pt", "npcache", "bitsandbytes"})
"""Load formats that read the model's own files, and nothing else."""

LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "su", "dynamic"})
"""RoPE variants that vLLM computes otherwise for engines made for longer prompts."""


class Namespaces:
    """The namespaces of one engine: one for each adapter and salt."""

    def __init__(self, vllm_config: VllmConfig, options: Options, layout: KVLayout) -> None:
        """Digest the model. Raises :class:`UsageError`, saying what to do, when that cannot be."""
        self._layout, self._tenant, self._codec = layout, options.tenant, options.codec
        self._model = model_digest(vllm_config, options)
        self._settings = engine_settings(vllm_config)
        self._adapters: dict[int, tuple[tuple[object, ...], bytes]] = {}
        """What each adapter's files looked like, and their digest."""
        self._known: dict[tuple[bytes | None, str | None], Namespace] = {}

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self._layout.block_tokens

    def of(self, request: Request) -> Namespace:
        """Return the namespace of ``request``.

        Raises:
            UsageError: it cannot be cached; says why.
        """
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise UsageError("prompts of embeddings have no tokens to be known by")
        if request.resumable:
            raise UsageError("the prompt of a streaming session may change")
        adapter = self._adapter(request.lora_request) if request.lora_request else None
        found = self._known.get((adapter, request.cache_salt))
        if found is None:
            found = Namespace(
                self._model,
                self._layout,
                adapter,
                self._settings,
                self._tenant,
                request.cache_salt,
                codec=self._codec,
            )
            if len(self._known) >= 4096:
                self._known.clear()
            self._known[adapter, request.cache_salt] = found
        return found

    def start_anew(self, nonce: bytes) -> None:
        """Know nothing of what was stored so far: the weights are other ones now."""
        self._model = framed_digest(self._model, nonce)
        self._known.clear()

    def _adapter(self, lora: LoRARequest) -> bytes:
        """Digest of the adapter's files, as they were when it was first asked for.

        Raises:
            UsageError: they have changed since: vLLM may have loaded the old ones or the new ones.
        """
        stamp = (lora.lora_path, *_stamps(Path(lora.lora_path)))
        known = self._adapters.get(lora.lora_int_id)
        if known is None or (known[0] != stamp and lora.load_inplace):
            known = stamp, adapter_digest(Path(lora.lora_path))
            self._adapters[lora.lora_int_id] = known
        if known[0] != stamp:
            raise UsageError(f"the files of adapter {lora.lora_name!r} have changed")
        return known[1]


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    found = sorted(path.iterdir()) if path.is_dir() else []
    return [(file.name, (s := file.stat()).st_size, s.st_mtime_ns) for file in found]


def model_digest(vllm_config: VllmConfig, options: Options) -> bytes:
    """Return what names the weights: the digest of their files, or what the options say."""
    if options.model_digest is not None:
        return framed_digest("given", options.model_digest)
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if load_format == FROM_SEED:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return framed_digest("seeded", model.seed, ranks)
    if load_format not in FROM_FILES:
        raise UsageError(
            f"weights of load_format {load_format!r} may come from anywhere: name them with the option "
            "model_digest"
        )
    path, cache = _local_path(model.model, model.revision), cache_file()
    others = sorted(path.glob("consolidated*.safetensors"))  # which vLLM may take instead
    digests = [weights_digest(path, cache), *(weights_digest(other, cache) for other in others)]
    return framed_digest("files", *digests)


def _local_path(model: str, revision: str | None) -> Path:
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - whatever a hub's client raises
        raise UsageError(
            f"the weights of {model!r} are not on this host ({error}): name them with the option "
            "model_digest"
        ) from None


def engine_settings(vllm_config: VllmConfig) -> bytes:
    """Digest of what else decides the keys and values: configuration, dtypes and quantisation."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    configured = model.hf_config.to_dict()
    words = set(re.findall(r"\w+", str(configured)))
    depends_on_length = not words.isdisjoint(LENGTH_DEPENDENT_ROPE)
    config = {
        "model": configured,
        "model_classes": model.architectures,
        "computed_in": str(model.dtype),
        "rope_length": model.max_model_len if depends_on_length else None,
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "media": _media_settings(vllm_config),
        "lora_dtype": str(getattr(vllm_config.lora_config, "lora_dtype", None)),
    }
    return settings_digest(config)


def _media_settings(vllm_config: VllmConfig) -> list[str]:
    """What decides how media are processed, besides what vLLM's own hash of a medium covers."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    if multimodal is None:
        return []
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    files = [Path(model.model) / name for name in names]
    return [
        str(multimodal.mm_processor_kwargs),
        str(getattr(multimodal, "video_pruning_rate", None)),
        *(file.read_text() for file in files if file.is_file()),
    ]


class Prompt:
    """The key bytes of a request's whole blocks, made as they are needed."""

    def __init__(self, request: Request, namespace: Namespace) -> None:
        """Take note of its media; its tokens are read later, as they come."""
        self.namespace = namespace
        self._request = request
        self._media = [_span(feature) for feature in request.mm_features or ()]
        self._key = b""

    def lookup_key(self) -> bytes:
        """Key bytes of all its tokens, a last incomplete block included."""
        return block_keys(self.namespace, self._request.all_token_ids[:], self._media)

    def head(self, num_blocks: int) -> bytes:
        """Key bytes of its first blocks."""
        stop = num_blocks * self.namespace.key_bytes
        if len(self._key) < stop:
            self._extend(num_blocks)
        return self._key[:stop]

    def _extend(self, num_blocks: int) -> None:
        tokens = self._request.all_token_ids
        width = self.namespace.layout.block_tokens
        if self._media:
            keys = block_keys(self.namespace, tokens[:], self._media)
            self._key = keys[: num_blocks * self.namespace.key_bytes]
        else:
            known = len(self._key) // self.namespace.key_bytes
            fresh = tokens[known * width : num_blocks * width]
            self._key += block_keys(self.namespace, fresh)


def _span(feature: Any) -> MediaSpan:
    """Return where a medium's tokens are, and what names its content."""
    digest = hashlib.blake2b(feature.identifier.encode(), digest_size=32).digest()
    return MediaSpan(feature.mm_position.offset, feature.mm_position.length, digest)

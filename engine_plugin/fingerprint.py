"""What a model computes, as a digest: never its name, its path or where it was loaded from.

The digest covers every parameter and buffer (name, dtype, shape, and XXH3-128 of its bytes), the
module tree, the numbers, strings and flags that modules keep as attributes, and the state of
adapters. It is computed once; each request then asks :meth:`Fingerprint.digest`, which looks for
signs of change and hashes again what changed:

1. a parameter, buffer or submodule was added, removed or replaced;
2. a tensor's memory, version counter, dtype or shape is another one (an optimiser step,
   ``load_state_dict``, ``param.data = ...``);
3. a number, string or flag has another value, or there is one attribute more or less;
4. an adapter was switched, merged, disabled or scaled;
5. a sample of every tensor's values differs (``param.data.copy_()`` leaves no other trace).

A write through ``.data`` to a few elements only must be told by :meth:`Fingerprint.refresh`. What
the digest does not cover at all must be kept apart by a salt: other attributes (lists, tensors that
are no buffers) and code changed at run time, but for the hooks and instance ``forward`` methods that
:meth:`Fingerprint.has_hooks` reports.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from kvstore.errors import UsageError
from kvstore.namespace import framed_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

SAMPLE_POINTS, SAMPLE_RUN = 16, 4
"""Values sampled from each tensor: this many places, so many neighbours at each, the last too."""

ADAPTER_STATE = frozenset(
    prefix + name
    for prefix in ("", "_")
    for name in (
        "active_adapter",
        "active_adapters",
        "disable_adapters",
        "merged",
        "merged_adapters",
        "scaling",
    )
)
"""Module attributes by which adapter libraries say what takes part in the forward pass."""

IRRELEVANT_ATTRIBUTES = (
    vars(torch.nn.Module()).keys()
    | ADAPTER_STATE
    | {
        "name_or_path",
        "_is_hf_initialized",
        "_attn_implementation",
        "_output_capturing_hooks_installed",
        "_use_kernels",
        "gradient_checkpointing",
    }
)
"""Module attributes that say nothing about the result in evaluation mode, or are seen elsewhere."""

PLAIN = frozenset({int, float, bool, str, type(None)})
"""Types of attributes that are part of the digest."""

OUR_HOOKS = ("transformers.", "accelerate.")
"""Modules whose forward hooks only move or record tensors."""

IRRELEVANT_SETTINGS = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "architectures",
        "dtype",
        "torch_dtype",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)
"""Configuration keys that do not change what keys and values mean (the dtype is in the layout)."""


MEMBERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Where :class:`torch.nn.Module` keeps what it consists of."""

GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
"""Where ``torch.nn.modules.module`` keeps the hooks of all modules."""


class _Signs(NamedTuple):
    """What is compared to notice a change."""

    identities: list[int]
    stamps: list[tuple[object, ...]]
    plain: list[object]
    adapters: list[str]


def settings_digest(config: Mapping[str, Any]) -> bytes:
    """Return the 32-byte digest of a model's configuration, given as nested mappings."""

    def relevant(value: object) -> object:
        if isinstance(value, dict):
            return {str(k): relevant(v) for k, v in value.items() if k not in IRRELEVANT_SETTINGS}
        return [relevant(item) for item in value] if isinstance(value, (list, tuple)) else value

    text = json.dumps(relevant(dict(config)), sort_keys=True, separators=(",", ":"), default=str)
    return framed_digest("settings", text)


class Fingerprint:
    """The digest of one model, kept up to date. Not thread-safe; keeps the tensors alive."""

    def __init__(self, model: nn.Module) -> None:
        """Hash the whole model; :class:`UsageError` if a tensor's bytes cannot be read."""
        self._model = model
        self.structure: list[str] = []
        """All but values and adapters, as last seen: types, attributes, shapes, dtypes, devices."""
        self._tensor_digests: dict[str, tuple[tuple[object, ...], bytes]] = {}
        self.refresh()

    def digest(self) -> bytes:
        """Return the 32-byte digest; hash again what shows a sign of change."""
        seen = self._seen
        if not torch_equal(seen.sample, seen.read_sample()):
            return self.refresh()
        return self._digest if seen.signs == seen.read_signs() else self._look()

    def has_hooks(self) -> bool:
        """Whether there is foreign code in the forward pass, whose effect no digest can tell.

        That is a forward hook, of a module or of all, or a ``forward`` put on a single module.
        Looks at the modules that the last :meth:`digest` saw.
        """
        return self._seen.has_hooks()

    def refresh(self) -> bytes:
        """Hash all that the digest covers again, also tensors without a sign of change."""
        self._tensor_digests.clear()
        return self._look()

    def _look(self) -> bytes:
        self._seen = seen = _Seen(self._model)
        known, self._tensor_digests = self._tensor_digests, {}
        tree = [f"{path}={own.get(name)!r}" for path, own, name in seen.plain]
        for name, module in seen.modules.items():
            tree += (name, type(module).__module__, type(module).__qualname__)
        for name, tensor in seen.tensors.items():
            tree += (name, str(tensor.dtype), str(tuple(tensor.shape)))
        self.structure = tree + [str(tensor.device) for tensor in seen.tensors.values()]
        parts: list[str | bytes] = ["weights", repr(seen.signs.adapters), *tree]
        for (name, tensor), stamp in zip(seen.tensors.items(), seen.signs.stamps, strict=True):
            found = known.get(name)
            value = found[1] if found and found[0] == stamp else _hash(name, tensor)
            self._tensor_digests[name] = (stamp, value)
            parts.append(value)
        self._digest = framed_digest(*parts)
        return self._digest


class _Seen:
    """One look at a model: what was there, and views that make looking again cheap."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.tensors = dict(sorted(named.items()))
        attributes = [vars(module) for module in self.modules.values()]
        self._attributes = attributes
        self.plain = [
            (f"{path}.{name}", own, name)
            for path, own in zip(self.modules, attributes, strict=True)
            for name in sorted(own.keys() - IRRELEVANT_ATTRIBUTES)
            if type(own[name]) in PLAIN
        ]
        self._adapters = [
            (f"{index}.{name}", own, name)
            for index, own in enumerate(attributes)
            for name in sorted(ADAPTER_STATE & own.keys())
        ]
        self._alive = [list(own[kind].values()) for own in attributes for kind in MEMBERS]
        self._points = _sample_views(self.tensors.values())
        self.signs = self.read_signs()
        self.sample = self.read_sample()

    def read_signs(self) -> _Signs:
        identities: list[int] = [sum(map(len, self._attributes))]
        for own in self._attributes:  # their dictionaries may be replaced, too
            for kind in MEMBERS:
                identities.extend(map(id, own[kind].values()))
        stamps: list[tuple[object, ...]] = [
            (id(t), t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.shape)  # noqa: SLF001
            for t in self.tensors.values()
        ]
        adapters = [f"{path}={_plain(own.get(name))}" for path, own, name in self._adapters]
        values = [own.get(name) for _, own, name in self.plain]
        plain = [value if type(value) in PLAIN else type(value) for value in values]
        return _Signs(identities, stamps, plain, adapters)

    def has_hooks(self) -> bool:
        everywhere = vars(torch.nn.modules.module)
        found = [everywhere[kind] for kind in GLOBAL_HOOKS]
        found += [own[kind] for own in self._attributes for kind in HOOKS]
        return any("forward" in own for own in self._attributes) or any(
            not str(getattr(hook, "__module__", "")).startswith(OUR_HOOKS)
            for hooks in found
            for hook in hooks.values()
        )

    def read_sample(self) -> list[torch.Tensor]:
        """Return the sampled values, one vector of integers for each element size and device."""
        return [torch.cat(views) for views in self._points]


def _sample_views(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return views of a few values of each tensor, as integers, by element size and device."""
    groups: defaultdict[object, list[torch.Tensor]] = defaultdict(list)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in tensors:
        count, width = tensor.numel(), tensor.element_size()
        if not count or width not in integers or not tensor.is_contiguous():
            continue  # the other signs remain
        flat = tensor.detach().view(-1).view(integers[width])
        run = min(SAMPLE_RUN, count)
        points = min(SAMPLE_POINTS, count // run)
        step = (count - run) // max(points - 1, 1)
        first = count - run - (points - 1) * step  # the last run ends with the tensor
        view = flat.as_strided((points, run), (step, 1), flat.storage_offset() + first)
        groups[width, run, tensor.device].append(view)
    return list(groups.values())


def torch_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether two lists hold equal tensors."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _plain(value: object) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def _hash(name: str, tensor: torch.Tensor) -> bytes:
    try:
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return xxhash.xxh3_128_digest(values.numpy().data)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UsageError(f"the bytes of {name} cannot be read: {error}") from error

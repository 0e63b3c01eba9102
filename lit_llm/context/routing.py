"""Send a module's own calls of ``scaled_dot_product_attention`` through another function.

A mode that watches torch functions is entered inside the ``forward`` of each module that makes such calls, on the
instance. Not around the whole step: activation checkpointing calls a module's ``forward`` again during the backward,
when a mode around the step has long been left, and would then attend inside the shard only, without an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["attention_callers", "refuse_unrouted", "route_scaled_dot_product_attention"]

_NAME = "scaled_dot_product_attention"
_FUNCTION = torch.nn.functional.scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def attention_callers(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules whose class names ``scaled_dot_product_attention`` in one of its methods, by name.

    Example:
        >>> class Attention(nn.Module):
        ...     def forward(self, q):
        ...         return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> list(attention_callers(nn.Sequential(nn.Linear(2, 2), Attention())))
        ['1']
    """
    return {name: child for name, child in module.named_modules() if _calls_attention(type(child))}


def route_scaled_dot_product_attention(
    module: nn.Module, attend: Attend, is_active: Callable[[int], bool]
) -> Callable[[], None]:
    """Send the causal attention calls of one module through ``attend`` while ``is_active(tokens)``.

    Args:
        module: one of :func:`attention_callers`.
        attend: called as ``attend(q, k, v, scale)`` with q ``[batch, seq, heads, head_dim]``, k and v
            ``[batch, seq, kv_heads, head_dim]``; answers like q.
        is_active: whether a call with that many query tokens is to be routed. Calls with another number of keys than
            queries never are.

    Returns:
        A function that undoes it.

    Raises:
        ValueError: at the call, if it is not causal, has a mask or drops out.
    """
    forward, name = module.forward, type(module).__name__

    def routed_forward(*args: Any, **kwargs: Any) -> Any:
        with _Route(attend, is_active, name):
            return forward(*args, **kwargs)

    own = "forward" in module.__dict__
    module.forward = routed_forward

    def undo() -> None:
        if own:
            module.forward = forward
        else:
            del module.forward

    return undo


@contextmanager
def refuse_unrouted(is_active: Callable[[int], bool]) -> Iterator[None]:
    """Raise at an attention call that no route has taken, while ``is_active(tokens)``.

    Raises:
        ValueError: at the call.
    """
    with _Refuse(is_active):
        yield


class _Route(TorchFunctionMode):
    def __init__(self, attend: Attend, is_active: Callable[[int], bool], caller: str) -> None:
        super().__init__()
        self.attend, self.is_active, self.caller = attend, is_active, caller

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not _FUNCTION:
            return function(*args, **kwargs)
        call = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        query, key, value = call["query"], call["key"], call["value"]
        if query.shape[-2] != key.shape[-2] or not self.is_active(query.shape[-2]):
            return function(*args, **kwargs)
        self._check(call)
        q, k, v = (tensor.transpose(-3, -2) for tensor in (query, key, value))
        return self.attend(q, k, v, call.get("scale")).transpose(-3, -2)

    def _check(self, call: dict[str, Any]) -> None:
        if call.get("attn_mask") is not None:
            raise ValueError(
                f"{self.caller} passes attn_mask to scaled_dot_product_attention, which cannot be routed: pass "
                "is_causal=True and no mask; documents are kept apart by the route"
            )
        if not call.get("is_causal"):
            raise ValueError(
                f"{self.caller} calls scaled_dot_product_attention without is_causal=True: only causal attention can "
                "be routed"
            )
        if call.get("dropout_p"):
            raise ValueError(
                f"{self.caller} has dropout_p={call['dropout_p']} in its attention: dropout inside attention cannot be "
                "routed, because its mask would depend on how the sequence is split. Set it to 0"
            )
        if call["query"].dim() != 4 or call["query"].shape[0] != 1:
            raise ValueError(
                f"{self.caller} calls scaled_dot_product_attention with queries {list(call['query'].shape)}: a shard "
                "is one row, [1, heads, tokens, head_dim]"
            )


class _Refuse(TorchFunctionMode):
    def __init__(self, is_active: Callable[[int], bool]) -> None:
        super().__init__()
        self.is_active = is_active

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _FUNCTION:
            query = args[0] if args else (kwargs or {})["query"]
            if self.is_active(query.shape[-2]):
                raise ValueError(
                    "scaled_dot_product_attention is called from a place that cannot be routed (a function, not a "
                    "method of an nn.Module), so its tokens would not see the rest of their sequence: call it in the "
                    "module's own forward"
                )
        return function(*args, **(kwargs or {}))


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _calls_attention(kind: type) -> bool:
    methods = (
        method
        for base in kind.__mro__
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch.nn")
        for method in vars(base).values()
    )
    codes = (getattr(getattr(method, "__func__", method), "__code__", None) for method in methods)
    return any(code is not None and _mentions(code) for code in codes)


def _mentions(code: CodeType) -> bool:
    return _NAME in code.co_names or any(_mentions(inner) for inner in code.co_consts if isinstance(inner, CodeType))

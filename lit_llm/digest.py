r"""A fingerprint of tensors that is the same for a whole tensor and for its shards, however they are cut.

Every element contributes a 64-bit number mixed from its bits, its index in the whole tensor and the tensor's name;
the digest is their sum modulo :math:`2^{64}`:

.. math::
    D = \sum_i \mathrm{mix}(b_i \oplus \mathrm{mix}(i + s)) \bmod 2^{64}, \qquad s = \mathrm{hash}(name, dtype).

A sum does not care in which order or on which rank its terms are computed, so digests of shards add up to that of the
whole, by one all-reduce. Each term depends on the position: swapped elements or tensors change it, unlike in a plain
hash of the values. All arithmetic is integer and runs on the tensor's own device. The mixing function is that of
SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). For mistakes, not for attackers.
"""

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

__all__ = ["digest", "digest_all"]

_CHUNK = 1 << 22  # elements at a time: a digest needs a few integers for each
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor, name: str = "", indices: Tensor | None = None) -> Tensor:
    """The digest of a tensor or of a shard of it.

    Args:
        tensor: any shape and dtype; NaN and signed zeros count by their bits.
        name: what the tensor is; equal values under another name have another digest.
        indices: for a shard, the index of each of its elements in the flattened whole, int64, as many as elements.
            None for a whole tensor.

    Returns:
        An int64 scalar tensor on the tensor's device. Those of shards add up (wrapping) to that of the whole.

    Raises:
        ValueError: if there are not as many indices as elements.

    Example:
        >>> whole = torch.arange(6.0)
        >>> parts = [digest(whole[part], indices=torch.arange(6)[part]) for part in (slice(0, 2), slice(2, 6))]
        >>> bool(sum(parts) == digest(whole))
        True
        >>> bool(digest(whole.flip(0)) == digest(whole))
        False
    """
    if indices is not None and indices.numel() != tensor.numel():
        raise ValueError(f"{indices.numel()} indices for {tensor.numel()} elements: give one for each")
    seed = _as_signed(xxhash.xxh3_64_intdigest(f"{name}\0{tensor.dtype}".encode()))
    bits = _bits(tensor.detach())
    per_element = bits.numel() // max(1, tensor.numel())  # 2 for complex numbers
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=bits.device)
        if indices is not None:
            place = indices.flatten()[place // per_element] * per_element + place % per_element
        total += _mix(part ^ _mix(place + seed)).sum()
    return total


def digest_all(tensors: Mapping[str, Tensor]) -> int:
    """One number for named tensors, whatever their order: the wrapping sum of their digests.

    Example:
        >>> one, two = torch.ones(2), torch.zeros(2)
        >>> digest_all({"a": one, "b": two}) == digest_all({"b": two, "a": one})
        True
        >>> digest_all({"a": one, "b": two}) == digest_all({"a": two, "b": one})
        False
    """
    return _as_signed(sum(int(digest(tensor, name)) for name, tensor in tensors.items()) % 2**64)


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bits as flat signed integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.int8)
    return tensor.contiguous().flatten().view(_SIGNED[tensor.element_size()])


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function on wrapping int64. Shifts are logical: the copied sign bits are masked off."""
    x = (x ^ _shift(x, 30)) * _as_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _as_signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _as_signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number

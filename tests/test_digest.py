"""The digest against the same sum in Python's big integers, and against what it must notice."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lit_llm.digest import digest, digest_all


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def by_hand(values, name):
    """For float32 values, with numpy's bits and Python's integers."""
    seed = xxhash.xxh3_64_intdigest(f"{name}\0torch.float32".encode())
    bits = [int(bit) % 2**64 for bit in np.asarray(values, dtype=np.float32).view(np.int32)]
    return sum(mix(bit ^ mix((index + seed) % 2**64)) for index, bit in enumerate(bits)) % 2**64


@given(st.lists(st.floats(width=32), max_size=20), st.text(max_size=5))
def test_is_the_sum_it_says(values, name):
    assert int(digest(torch.tensor(values, dtype=torch.float32), name)) % 2**64 == by_hand(values, name)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_add_up_however_they_are_cut(dtype):
    whole = torch.randn(6, 7).mul(3).to(dtype)
    index = torch.arange(42).view(6, 7)
    expected = digest(whole, "w")
    for cut in ([slice(0, 2), slice(2, 6)], [slice(0, 6, 2), slice(1, 6, 2)]):
        assert sum(digest(whole[part], "w", index[part]) for part in cut) == expected
        assert sum(digest(whole[:, part], "w", index[:, part]) for part in [*cut, slice(6, 7)]) == expected


def test_large_tensors_are_taken_in_parts(monkeypatch):
    import lit_llm.digest

    whole = torch.randn(100)
    expected = digest(whole)
    monkeypatch.setattr(lit_llm.digest, "_CHUNK", 7)
    assert digest(whole) == expected
    assert digest(whole, indices=torch.arange(100)) == expected


@given(st.integers(0, 99), st.integers(0, 31))
def test_every_bit_counts(position, bit):
    tensor = torch.arange(100, dtype=torch.int32)
    changed = tensor.clone()
    changed[position] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    assert digest(tensor) != digest(changed)


def test_order_name_dtype_and_place_count():
    tensor = torch.arange(8.0)
    others = [
        digest(tensor.flip(0)),
        digest(tensor, "other"),
        digest(tensor.double()),
        digest(tensor, indices=torch.arange(1, 9)),
        digest(torch.tensor([-0.0, *range(1, 8)])),
    ]
    assert len({int(other) for other in [digest(tensor), *others]}) == 6
    mask = torch.tensor([True, False, False, True])
    assert digest(mask) != digest(mask.flip(0)[[1, 0, 2, 3]])
    assert digest_all({"a": tensor, "b": mask}) == digest_all({"b": mask, "a": tensor})
    assert int(digest(torch.empty(0))) == 0


def test_transposed_views_are_read_in_their_own_order():
    tensor = torch.randn(3, 5)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(tensor.t()) != digest(tensor)


def test_one_index_for_each_element():
    with pytest.raises(ValueError, match="3 indices for 4 elements"):
        digest(torch.zeros(4), indices=torch.arange(3))

from pathlib import Path

import numpy as np
import pytest
import torch

from lit_llm.data.loader import PackSampler, Position, pack_loader
from lit_llm.data.store import TokenStore, write_store
from lit_llm.packing import plan_epoch

LENGTHS = np.random.default_rng(0).integers(2, 20, 60)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    write_store(tmp_path, [(np.full(n, i), np.full(n, i)) for i, n in enumerate(LENGTHS)], {})
    return TokenStore(tmp_path)


def plan(epoch: int) -> list[tuple[int, ...]]:
    packs = plan_epoch(LENGTHS, 32, 7, epoch)
    return [packs[i] for i in range(len(packs))]


def sampler(**options: object) -> PackSampler:
    return PackSampler(LENGTHS, 32, **{"batch_size": 1, "seed": 7, **options})


def test_epochs_and_positions_in_a_plain_loop() -> None:
    plain = sampler()
    for epoch in (0, 1, 2):
        plain.set_epoch(epoch)
        assert list(plain) == plan(epoch) and len(plain) == len(plan(epoch))
    resumed = sampler(position=Position(1, 5))
    assert list(resumed) == plan(1)[5:] and len(resumed) == len(plan(1))
    resumed.set_epoch(1)
    assert list(resumed) == plan(1)[5:]
    resumed.set_epoch(2)
    assert list(resumed) == plan(2)


def test_a_trainers_epochs_count_from_the_first_in_which_it_trains() -> None:
    trained = 40
    resumed = sampler(position=Position(1, 5), trained=lambda: trained)
    for trainer_epoch in (3, 4):  # epoch 3 turns out to be complete
        resumed.set_epoch(trainer_epoch)
        assert list(resumed) == plan(1)[5:]
    trained += 9
    resumed.set_epoch(5)
    assert list(resumed) == plan(2)
    assert resumed.num_trained == 9


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_validation_reads_every_sample_once_on_any_number_of_ranks(store: TokenStore, replicas: int) -> None:
    read, batches = [], set()
    for rank in range(replicas):
        loader = pack_loader(store, sampler(seed=None, batch_size=2, num_replicas=replicas, rank=rank), pad_id=99)
        got = list(loader)
        batches.add(len(got))
        assert len(got) == len(loader)
        for batch in got:
            real = batch["input_ids"] != 99
            read += batch["input_ids"][real].tolist()
    assert len(batches) == 1
    assert np.bincount(read).tolist() == LENGTHS.tolist()


def test_workers_read_the_same_and_the_global_generator_is_left_alone(store: TokenStore) -> None:
    state = torch.get_rng_state()
    plain, forked = (
        [batch["input_ids"] for batch in pack_loader(store, sampler(batch_size=4), 99, num_workers=workers)]
        for workers in (0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(plain, forked, strict=True))


def test_an_index_may_be_one_sample(store: TokenStore) -> None:
    dataset = pack_loader(store, sampler(), 99).dataset
    assert len(dataset) == 60 and dataset[3][0][0].tolist() == [3] * LENGTHS[3]

import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
from cache_building import build_slowly

from lit_llm.data.store import TokenStore, cached, default_cache_dir, write_store

SAMPLES = [(np.array([5, 6, 7], np.int32), np.array([-100, 6, -100])), (np.array([8, 9]), np.array([-100, 9]))]


def test_samples_come_back_also_in_another_process(tmp_path: Path) -> None:
    write_store(tmp_path, SAMPLES, {"dropped": 2})
    store = TokenStore(tmp_path)
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000  # the folder, not the arrays
    for opened in (store, pickle.loads(pickled)):
        assert len(opened) == 2 and opened.lengths.tolist() == [3, 2]
        for (tokens, labels), (expected_tokens, expected_labels) in zip(opened, SAMPLES, strict=False):
            assert tokens.tolist() == expected_tokens.tolist() and labels.tolist() == expected_labels.tolist()
    assert store.target_counts(12).tolist() == [0] * 6 + [1, 0, 0, 1, 0, 0]
    assert {**store.meta, "fingerprint": ""} == {
        "dropped": 2, "samples": 2, "tokens": 5, "trained": 2, "fingerprint": "",
    }  # fmt: skip


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    prints = []
    for name, samples in (("a", SAMPLES), ("b", SAMPLES), ("c", SAMPLES[:1])):
        (tmp_path / name).mkdir()
        write_store(tmp_path / name, samples, {})
        prints.append(TokenStore(tmp_path / name).meta["fingerprint"])
    assert prints[0] == prints[1] != prints[2]


def test_an_empty_store(tmp_path: Path) -> None:
    write_store(tmp_path, [], {})
    assert len(TokenStore(tmp_path)) == 0


def test_of_two_processes_at_once_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(build_slowly, [str(tmp_path)] * 2, chunksize=1)
    assert results == [str(tmp_path / "result" / "done")] * 2
    assert (tmp_path / "result" / "done").exists()
    assert (tmp_path / "builds").read_text() == "x"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        cached(tmp_path / "result", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["result.lock"]


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"cannot write the data cache {tmp_path}/file.*cache_dir="):
        cached(tmp_path / "file" / "result", lambda folder: None)


def test_the_default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/lit-llm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/lit-llm")

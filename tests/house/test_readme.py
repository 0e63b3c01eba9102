"""What the README shows exists and says what it claims."""

import re

from _checkout import ROOT

README = (ROOT / "README.md").read_text()


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_four_lines_train(tmp_path, monkeypatch) -> None:
    """The code block as it stands, with two CPU processes' worth of settings put in."""
    from lightning.pytorch import Trainer
    from tiny import Batches, PlainModule, first, packed_batch, tiny_llama
    from torch.utils.data import DataLoader

    monkeypatch.chdir(tmp_path)
    block = next(code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "trainer.fit" in code)
    code = block.replace("devices=8", "devices=1, accelerator='cpu', max_steps=1, logger=False")
    names = {
        "module": PlainModule(tiny_llama()),
        "loader": DataLoader(Batches([packed_batch([9, 4])]), collate_fn=first),
    }
    exec(compile(code, "README.md", "exec"), names)
    assert isinstance(names["trainer"], Trainer)
    assert names["trainer"].global_step == 1


def test_the_gate_passes_as_printed() -> None:
    from tiny import packed_batch, tiny_llama

    block = next(code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "parity(" in code)
    printed: list[str] = []
    names = {"model": tiny_llama(), "batch": packed_batch([30, 20]), "print": lambda value: printed.append(str(value))}
    exec(compile(block, "README.md", "exec"), names)
    assert printed[0].startswith("PASS context_parallel_parity: ")

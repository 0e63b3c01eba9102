"""Every way a user names the strategy: by string in a script, under torchrun, in a YAML of their own CLI."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
{imports}
from tiny import PlainModule, fit, packed_batch, tiny_llama

if __name__ == "__main__":
    record = fit(PlainModule(tiny_llama()), [packed_batch([37, 1, 20, 5])], strategy={strategy}, devices=2)
    rank = torch.distributed.get_rank()
    Path(sys.argv[1], f"rank-{{rank}}").write_text(f"{{record.loss:.6f}} {{record.targets}}")
"""


def run_script(tmp_path, strategy, imports="import lit_llm", launcher=()):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests"), strategy=strategy, imports=imports))
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
    )
    return done, sorted(tmp_path.glob("rank-*"))


@pytest.mark.parametrize(
    ("strategy", "imports", "launcher"),
    [
        ('"context_parallel"', "import lit_llm", ()),
        ('"context_parallel_fsdp"', "import lit_llm", ()),
        ('"context_parallel"', "import lit_llm.loss", ("-m", "torch.distributed.run", "--nproc-per-node=2")),
        ("ContextParallelStrategy(layout='zigzag')", "from lit_llm.strategies import ContextParallelStrategy", ()),
    ],
    ids=["by name", "sharded", "torchrun", "object"],
)
def test_scripts(tmp_path, strategy, imports, launcher):
    done, files = run_script(tmp_path, strategy, imports, launcher)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in files] == ["rank-0", "rank-1"]
    assert files[0].read_text() == files[1].read_text()


YAML_BY_NAME = "trainer: {accelerator: cpu, devices: 1, strategy: context_parallel}"
YAML_BY_CLASS = """
trainer:
  accelerator: cpu
  devices: 1
  strategy:
    class_path: lit_llm.strategies.ContextParallelStrategy
    init_args: {context_parallel_size: 1, layout: zigzag, timeout: null}
"""
YAML_SHARDED = """
trainer:
  accelerator: cpu
  devices: 1
  strategy:
    class_path: lit_llm.strategies.ContextParallelFSDPStrategy
    init_args: {context_parallel_size: 1, layout: zigzag, save_distributed_checkpoint: false, shard_modules: layers.*}
"""
CLI = """
{imports}
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
cli = LightningCLI(BoringModel, run=False)
print(type(cli.trainer.strategy).__name__, cli.trainer.strategy._layout)
"""


@pytest.mark.parametrize(
    ("content", "imports", "expected"),
    [
        (YAML_BY_NAME, "import lit_llm", "ContextParallelStrategy balanced"),
        (YAML_BY_CLASS, "", "ContextParallelStrategy zigzag"),
        (YAML_SHARDED, "", "ContextParallelFSDPStrategy zigzag"),
    ],
    ids=["by name", "by class path", "sharded"],
)
def test_lightning_cli(tmp_path, content, imports, expected):
    (tmp_path / "config.yaml").write_text(content)
    (tmp_path / "app.py").write_text(CLI.format(imports=imports))
    done = subprocess.run(
        [sys.executable, "app.py", "--config", "config.yaml"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert expected in done.stdout, done.stderr


@pytest.mark.parametrize(
    "imports", ["import lit_llm, pytorch_lightning as pl", "import pytorch_lightning as pl, lit_llm"]
)
def test_the_twin_package_says_which_import_to_use(tmp_path, imports):
    code = f"{imports}\npl.Trainer(strategy='context_parallel', accelerator='cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode != 0
    assert "write 'import lightning.pytorch as pl' instead of 'import pytorch_lightning as pl'" in done.stderr


def test_importing_twice_registers_once():
    from lightning.pytorch.strategies import StrategyRegistry

    from lit_llm.strategies import ContextParallelFSDPStrategy, ContextParallelStrategy, register_strategies

    register_strategies()
    assert isinstance(StrategyRegistry.get("context_parallel_fsdp"), ContextParallelFSDPStrategy)
    assert isinstance(StrategyRegistry.get("context_parallel"), ContextParallelStrategy)

"""What a run achieved, in a table, a curve and a sentence."""

import csv
import json
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lit_llm.files import atomic_path, atomic_write

__all__ = ["RunSummary", "draw_loss_curve", "read_metrics"]


class RunSummary(Callback):
    """Prints, at the end of ``fit``, what the run achieved, and leaves it in the run's folder.

    The table compares the held-out loss of the trained model with that of the untrained one (taken from the sanity
    check, if ``Trainer(num_sanity_val_steps=-1)`` makes it a whole validation) and with that of a unigram model (if
    the data module has ``unigram_loss()``). With a module that has ``generate`` and a data module that has
    ``example()`` it prints one generated answer. In the folder it leaves ``summary.json`` and, with matplotlib,
    ``loss.png``.

    Args:
        monitor: the logged held-out loss, a token mean in nats.
        max_new_tokens: of the answer; 0 for none.

    Example::

        Trainer(callbacks=[RunSummary()], logger=CSVLogger("runs", "mine", version=""), num_sanity_val_steps=-1)
    """

    def __init__(self, monitor: str = "val/loss", max_new_tokens: int = 48) -> None:
        self.monitor, self.max_new_tokens = monitor, max_new_tokens
        self._untrained: float | None = None
        self._tokens, self._seconds, self._started = 0, 0.0, 0.0

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._untrained = _value(trainer, self.monitor)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seconds += time.perf_counter() - self._started
        if isinstance(batch, dict) and isinstance(batch.get("input_ids"), torch.Tensor):
            replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
            self._tokens += batch["input_ids"].numel() * replicas

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"untrained": self._untrained, "tokens": self._tokens, "seconds": self._seconds}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._untrained = state_dict["untrained"]
        self._tokens, self._seconds = state_dict["tokens"], state_dict["seconds"]

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir is a broadcast: every rank has to ask
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        example = self._answered_example(trainer, pl_module, data)
        if not trainer.is_global_zero:
            return
        summary: dict[str, Any] = {
            "steps": trainer.global_step,
            "loss": _value(trainer, self.monitor),
            "untrained_loss": self._untrained,
            "unigram_loss": data.unigram_loss() if hasattr(data, "unigram_loss") else None,
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / self._seconds if self._seconds else None,
            "folder": str(folder),
            "checkpoint": getattr(trainer.checkpoint_callback, "last_model_path", None) or None,
        }
        curve = draw_loss_curve(folder, summary["unigram_loss"])
        atomic_write(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        console = Console(soft_wrap=True)
        console.print(_table(summary))
        _print_facts(console, summary, curve)
        for title, text in example.items():
            console.print(f"\n[bold]{title}[/bold]")
            console.print(text.strip() or "(empty)", markup=False, highlight=False)

    def _answered_example(self, trainer: Trainer, pl_module: Any, data: Any) -> dict[str, str]:
        """A held-out question and the model's answer; nothing if the module or the data cannot give them."""
        if not (self.max_new_tokens and hasattr(pl_module, "generate") and hasattr(data, "example")):
            return {}
        # sharded weights are gathered by all ranks together; decoding is greedy, so they stay in step
        sharded = any(isinstance(parameter, DTensor) for parameter in pl_module.parameters())
        if not (trainer.is_global_zero or sharded):
            return {}
        question = [message for message in data.example() if message["role"] != "assistant"][:1]
        answer = pl_module.generate(question, data.tokenizer, self.max_new_tokens)
        return {"a held-out question": question[-1]["content"], "the model's answer": answer}


def read_metrics(folder: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) pairs of one metric from the CSV files of a run, those before a resume included.

    Example:
        >>> read_metrics(Path("nowhere"), "train/loss")
        []
    """
    points: dict[int, float] = {}
    for file in sorted(folder.glob("metrics*.csv"), key=lambda path: path.stat().st_mtime):
        with file.open(newline="") as rows:
            points.update({int(row["step"]): float(row[name]) for row in csv.DictReader(rows) if row.get(name)})
    return sorted(points.items())


def draw_loss_curve(folder: Path, unigram_loss: float | None = None) -> Path | None:
    """Draw the training and held-out loss of a run as ``loss.png``; None without matplotlib or metrics.

    Args:
        folder: of the run, with its ``metrics*.csv``.
        unigram_loss: drawn as a line to beat.
    """
    curves = {name: read_metrics(folder, name) for name in ("train/loss", "val/loss")}
    if not curves["train/loss"]:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        rank_zero_warn("no loss curve was drawn: pip install 'lit-llm[viz]'")
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, points), marker in zip(curves.items(), ("", "o"), strict=True):
        axes.plot([step for step, _ in points], [value for _, value in points], label=name, marker=marker)
    if unigram_loss is not None:
        axes.axhline(unigram_loss, linestyle="--", color="gray", label="unigram, held out")
    axes.set(xlabel="optimizer step", ylabel="loss per token (nats)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_path(folder / "loss.png") as path:
        figure.savefig(path, dpi=120)
    return folder / "loss.png"


def _table(summary: dict[str, Any]) -> Table:
    table = Table("", "held-out loss", "perplexity", title=f"after {summary['steps']} steps")
    for label, key in (("trained model", "loss"), ("untrained model", "untrained_loss"), ("unigram", "unigram_loss")):
        if summary[key] is not None:
            loss = torch.tensor(summary[key])
            table.add_row(label, f"{loss:.3f}", f"{loss.exp():.1f}")
    return table


def _print_facts(console: Console, summary: dict[str, Any], curve: Path | None) -> None:
    facts = {
        "tokens/s": f"{summary['tokens_per_second']:,.0f}" if summary["tokens_per_second"] else None,
        "files": summary["folder"],
        "loss curve": curve,
        "checkpoint": summary["checkpoint"],
    }
    for name, fact in facts.items():
        if fact is not None:
            console.print(f"{name + ':':12} {fact}", markup=False, highlight=False)


def _value(trainer: Trainer, name: str) -> float | None:
    value = trainer.callback_metrics.get(name)
    return None if value is None else float(value)

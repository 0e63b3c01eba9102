"""The command ``lit-llm``: training from a YAML file, and the gates on what the file configures.

``fit``, ``validate``, ``test`` and ``predict`` are those of LightningCLI; ``check`` runs every gate.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from jsonargparse import DefaultHelpFormatter
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lit_llm.verdict import Verdict

__all__ = ["LitLLMCLI", "main"]

_DESCRIPTION = """\
Train large language models with PyTorch Lightning, and prove that nothing was corrupted.

  lit-llm fit --config configs/quickstart.yaml                  train
  lit-llm fit --config FILE --ckpt_path CHECKPOINT              resume
  lit-llm fit --config FILE --data.train chats.jsonl            any argument can be set on the command line
  lit-llm fit --config FILE --trainer.strategy ddp --print_config
  lit-llm fit --help                                            every argument; --model.help CLASS for a class
  lit-llm check FILE                                            run every gate on the configured model and data

Errors are a sentence; --trace before the subcommand shows where they come from."""

_FINISHED = "finished"  # in the run's folder once fit has come to its end


class _HelpFormatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


class LitLLMCLI(LightningCLI):
    """LightningCLI over any LightningModule and data module, that never loses an earlier run.

    Args:
        args: the command line, ``sys.argv[1:]`` if None.
        execute: False to only build what the command line configures.
    """

    def __init__(self, args: ArgsType = None, execute: bool = True) -> None:
        self._execute = execute
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"description": _DESCRIPTION, "prog": "lit-llm", "formatter_class": _HelpFormatter},
            args=args,
        )

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would silently replace the configured model by the one in the checkpoint."""

    def _run_subcommand(self, subcommand: str) -> None:
        if self._execute:
            super()._run_subcommand(subcommand)

    def before_fit(self) -> None:
        """Find the checkpoint to resume from, and set an earlier run in the same folder aside."""
        ckpt_path = self.config_init["fit"].get("ckpt_path")
        if ckpt_path and ckpt_path not in ("last", "best", "hpc", "registry") and not Path(ckpt_path).exists():
            raise MisconfigurationException(f"the checkpoint {str(Path(ckpt_path).resolve())!r} does not exist")
        folder = run_folder(self.trainer)
        if folder is not None and _is_first_process():
            prepare_run_folder(folder, resuming=bool(ckpt_path), command=_own_command())

    def after_fit(self) -> None:
        """Mark the run as finished."""
        folder = run_folder(self.trainer)
        if folder is not None and self.trainer.is_global_zero and folder.exists():
            (folder / _FINISHED).touch()


def run_folder(trainer: Trainer) -> Path | None:
    """The folder that belongs to this run alone: a CSVLogger's, if its version is empty; else None."""
    logger = trainer.logger
    return Path(logger.log_dir) if isinstance(logger, CSVLogger) and logger.version == "" else None


def prepare_run_folder(folder: Path, resuming: bool, command: str) -> None:
    """Keep what an earlier run left in ``folder``.

    - resuming: its metrics become ``metrics.N.csv``, because the logger would overwrite them;
    - it has finished, or never wrote a checkpoint: the folder becomes ``folder.N``;
    - it was interrupted: it is not touched, and the error says how to resume it.

    Raises:
        MisconfigurationException: if an interrupted run could be resumed.
    """
    if resuming:
        (folder / _FINISHED).unlink(missing_ok=True)
        metrics = folder / "metrics.csv"
        if metrics.exists():
            metrics.rename(_free(lambda number: folder / f"metrics.{number}.csv"))
        return
    if not folder.exists() or not any(folder.iterdir()):
        return
    checkpoints = sorted(folder.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
    if checkpoints and not (folder / _FINISHED).exists():
        raise MisconfigurationException(
            f"{folder} holds a run that was interrupted.\n"
            f"  To resume it:      {command} --ckpt_path {checkpoints[-1]}\n"
            f"  To start another:  mv {folder} {_free(lambda number: Path(f'{folder}.{number}'))}"
        )
    aside = _free(lambda number: Path(f"{folder}.{number}"))
    folder.rename(aside)
    print(f"the earlier run in {folder} is now in {aside}", file=sys.stderr)


def _free(name: Any) -> Path:
    return next(path for path in map(name, range(1, sys.maxsize)) if not path.exists())


def _own_command() -> str:
    return " ".join(["lit-llm", *sys.argv[1:]])


def _is_first_process() -> bool:
    variables = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(variable, "0") == "0" for variable in variables)


def check(arguments: Sequence[str]) -> int:
    """Run every registered gate on what a configuration file describes.

    Args:
        arguments: the file, then overrides as for ``fit``.

    Returns:
        0 if every gate passes, else 1.
    """
    from lit_llm.gates import GATES

    if not arguments or arguments[0].startswith("-"):
        print("usage: lit-llm check FILE [--data.train PATH …]\n\nRuns every gate on the configured model and data:\n")
        for gate in GATES:
            print(f"  {gate.name}: without it, {gate.guards_against}")
        return 0 if list(arguments) in (["--list"], ["--help"], ["-h"]) else 2
    if not Path(arguments[0]).exists():
        raise MisconfigurationException(f"the configuration {str(Path(arguments[0]).resolve())!r} does not exist")
    overrides = [
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.strategy=auto",
        "--trainer.logger=false",
    ]
    cli = LitLLMCLI(["fit", "--config", *arguments, *overrides], execute=False)
    model, batch = first_batch(cli)
    console = Console(soft_wrap=True, highlight=False)
    verdicts: list[Verdict] = []
    for gate in GATES:
        with console.status(f"{gate.name} …"):
            verdicts.append(gate.run(model, batch))
        console.print(str(verdicts[-1]), style="green" if verdicts[-1].passed else "bold red", markup=False)
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def first_batch(cli: LitLLMCLI) -> tuple[Any, Any]:
    """The configured model, built, and the first training batch, without starting the trainer."""
    trainer, module, data = cli.trainer, cli.model, cli.datamodule
    trainer.strategy.connect(module)
    module.trainer = trainer
    if data is not None:
        trainer.datamodule = data  # type: ignore[attr-defined]
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
    module.prepare_data()
    module.setup("fit")
    module.configure_model()
    loader = data.train_dataloader() if data is not None else module.train_dataloader()
    batch = next(iter(loader), None)
    if batch is None:
        raise MisconfigurationException("there is no training batch to check: the data is empty")
    from lit_llm.huggingface import outermost_models

    models = outermost_models(module)
    return (models[0] if models else module), batch


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; exits with status 1 and one sentence for an error that the user can mend."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    trace = given[:1] == ["--trace"]
    given = given[1:] if trace else given
    for message in (".*LeafSpec.*", ".*LightningCLI's args parameter.*"):  # nothing that the user could mend
        warnings.filterwarnings("ignore", message=message)
    try:
        if given[:1] == ["check"]:
            sys.exit(check(given[1:]))
        LitLLMCLI(None if arguments is None and not trace else given)
    except (ValueError, MisconfigurationException) as error:
        if trace:
            raise
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
        print(f"\nlit-llm: error on rank {rank}: {error}", file=sys.stderr, flush=True)
        _exit_with_error()


def _exit_with_error() -> NoReturn:
    """Exit with status 1. With a process group at once: its threads abort a process that ends while a peer does."""
    if dist.is_available() and dist.is_initialized():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)
    sys.exit(1)


if __name__ == "__main__":
    main()

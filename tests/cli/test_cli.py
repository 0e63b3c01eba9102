"""The command line as a user meets it: real processes, started as the README says."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """Forty short chats and a cache that all tests share."""
    folder = tmp_path_factory.mktemp("chats")
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {a + 1}?"},
                {"role": "assistant", "content": f"{a} plus {a + 1} is {2 * a + 1}. " * (1 + a % 5)},
            ]
        }
        for a in range(40)
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def config(tmp_path, chats):
    """A configuration file in the shape of the quickstart's, for a model that takes seconds."""
    content = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "context_parallel",
            "max_steps": 6,
            "max_epochs": 100,
            "num_sanity_val_steps": -1,
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "log_every_n_steps": 1,
            "enable_model_summary": False,
            "default_root_dir": "runs/tiny",
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": "runs", "name": "tiny", "version": "", "flush_logs_every_n_steps": 1},
            },
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": "runs/tiny/checkpoints", "every_n_train_steps": 2, "save_last": True},
                },
                {"class_path": "lit_llm.callbacks.RunSummary", "init_args": {"max_new_tokens": 4}},
            ],
        },
        "model": {
            "class_path": "lit_llm.module.CausalLMModule",
            "init_args": {"model": TINY, "learning_rate": 0.01, "warmup_steps": 2},
        },
        "data": {
            "class_path": "lit_llm.data.PackedSFTDataModule",
            "init_args": {
                "train": str(chats),
                "val_fraction": 0.2,
                "max_length": 96,
                "vocab_size": 300,
                "cache_dir": str(chats.parent / "cache"),
            },
        },
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(*arguments):
    return [sys.executable, str(Path(sys.executable).with_name("lit-llm")), *map(str, arguments)]


def run(folder, *arguments, status=0, timeout=150):
    """Run `lit-llm`; its output, both streams together."""
    done = subprocess.run(
        command(*arguments), cwd=folder, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def test_fit_leaves_what_it_promises_and_resumes(tmp_path, config):
    output = run(tmp_path, "fit", "--config", config)
    folder = tmp_path / "runs" / "tiny"
    for text in ("trained model", "untrained model", "unigram", "tokens/s", "runs/tiny", "the model's answer"):
        assert text in output
    assert {"config.yaml", "metrics.csv", "loss.png", "summary.json", "checkpoints", "finished"} <= {
        path.name for path in folder.iterdir()
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["loss"] < summary["untrained_loss"]
    assert summary["tokens"] == 6 * 96
    assert (folder / "checkpoints" / "last.ckpt").exists()

    # a finished run is set aside by the next one, and resuming an old checkpoint loses no metrics
    output = run(tmp_path, "fit", "--config", config)
    assert "the earlier run in runs/tiny is now in runs/tiny.1" in output
    assert json.loads((tmp_path / "runs" / "tiny.1" / "summary.json").read_text()) == summary
    output = run(
        tmp_path, "fit", "--config", config, "--trainer.max_steps", 9, "--ckpt_path", "runs/tiny/checkpoints/last.ckpt"
    )
    assert json.loads((folder / "summary.json").read_text())["steps"] == 9
    assert (folder / "metrics.1.csv").exists() and (folder / "metrics.csv").exists()
    from lit_llm.callbacks.run_summary import read_metrics

    assert [step for step, _ in read_metrics(folder, "train/loss")] == list(range(9))


def test_two_processes_end_where_one_with_ddp_does(tmp_path, config):
    run(tmp_path, "fit", "--config", config)
    two = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    run(tmp_path, "fit", "--config", config, "--trainer.strategy", "ddp", "--trainer.devices", 1)
    one = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert abs(two["untrained_loss"] - one["untrained_loss"]) < 1e-4
    assert abs(two["loss"] - one["loss"]) < 1e-3 * one["loss"]
    assert two["tokens"] == one["tokens"]


def start(folder, *arguments):
    """Start `lit-llm` in a session of its own and wait for its first checkpoint."""
    process = subprocess.Popen(
        command(*arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    checkpoint = folder / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    assert checkpoint.exists(), process.communicate()[0] if process.poll() is not None else "no checkpoint in time"
    return process, checkpoint


def expect_end(process, seconds):
    """It ends in time, with an error, and leaves no process behind."""
    started = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < seconds
    assert process.returncode != 0
    assert members_of_session(process.pid) == [], output


@pytest.mark.parametrize("whom", ["first", "both"])
def test_ctrl_c_ends_both_processes_and_says_how_to_resume(tmp_path, config, whom):
    """SIGINT to the first process alone (a supervisor), or to both (a terminal)."""
    arguments = ["fit", "--config", config, "--trainer.max_steps", 100000]
    process, checkpoint = start(tmp_path, *arguments)
    if whom == "both":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    expect_end(process, 15)
    torch.load(checkpoint, weights_only=True)  # whole

    output = run(tmp_path, *arguments, status=1)
    assert "runs/tiny holds a run that was interrupted" in output
    resume = re.search(r"--ckpt_path (\S+\.ckpt)", output).group(1)
    step = torch.load(tmp_path / resume, weights_only=True)["global_step"]
    run(tmp_path, "fit", "--config", config, "--trainer.max_steps", step + 2, "--ckpt_path", resume)
    assert json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["steps"] == step + 2


def test_a_killed_process_ends_the_other(tmp_path, config):
    process, _ = start(tmp_path, "fit", "--config", config, "--trainer.max_steps", 100000)
    second = next(
        int(line.split()[0]) for line in members_of_session(process.pid) if int(line.split()[0]) != process.pid
    )
    os.kill(second, signal.SIGKILL)
    expect_end(process, 30)


def members_of_session(session):
    time.sleep(0.5)
    found = subprocess.run(["ps", "-o", "pid=,stat=,args=", "-s", str(session)], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if line.split()[1][0] != "Z"]


def errors_of(output):
    return re.findall(r"lit-llm: error on rank (\d): (.*)", output)


@pytest.mark.parametrize(
    ("overrides", "contains"),
    [
        (["--trainer.devices", "2", "--trainer.strategy", "ContextParallelStrategy",
          "--trainer.strategy.context_parallel_size", "3"],
         "context_parallel_size=3 does not divide the world size of 2 devices: choose one of 1, 2"),
        (["--data.train", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--data.train", "broken.jsonl"], "broken.jsonl"),
        (["--data.train", "empty.jsonl"], "empty.jsonl"),
        (["--model.model", "{model_type: no_such_model}"], "transformers knows no model_type 'no_such_model'"),
        (["--model.model", "package:llm_nothing/m.gguf"], "'llm_nothing', which is not installed: pip install"),
        (["--ckpt_path", "no.ckpt"], "no.ckpt' does not exist"),
    ],
)  # fmt: skip
def test_errors_are_a_sentence_on_every_rank(tmp_path, config, overrides, contains):
    (tmp_path / "empty.jsonl").write_text("")
    chat = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    (tmp_path / "broken.jsonl").write_text(f"{chat}\n{{not json\n")
    output = run(tmp_path, "fit", "--config", config, *overrides, status=1)
    errors = errors_of(output)
    # the checkpoint's path is looked at before there is a second process
    assert {rank for rank, _ in errors} == ({"0"} if "--ckpt_path" in overrides else {"0", "1"}), output
    assert all(contains in message for _, message in errors), output
    assert "Traceback" not in output
    if "broken.jsonl" in overrides:
        assert all(re.search(r"broken\.jsonl.*\b2\b", message) for _, message in errors), output


def test_a_checkpoint_of_another_model(tmp_path, config):
    run(tmp_path, "fit", "--config", config)
    other = ["--model.model.hidden_size", "48", "--model.model.intermediate_size", "64"]
    arguments = ["fit", "--config", config, *other, "--ckpt_path", "runs/tiny/checkpoints/last.ckpt"]
    output = run(tmp_path, *arguments, status=1)
    errors = errors_of(output)
    assert {rank for rank, _ in errors} == {"0", "1"}, output
    for _, message in errors:
        assert "the checkpoint is from another model: hidden_size 32 there and 48 here" in message


def test_check_and_help(tmp_path, config):
    output = run(tmp_path, "check", config)
    assert re.search(r"PASS context_parallel_parity: .* <= 0.0001 \(relative gradient error\)", output)
    assert "context_parallel_parity: without it" in run(tmp_path, "check", "--list")
    output = run(tmp_path, "check", "nothing.yaml", status=1)
    assert "nothing.yaml' does not exist" in output
    output = run(tmp_path, "--help")
    for word in ("lit-llm fit --config", "lit-llm check", "--ckpt_path", "validate", "predict"):
        assert word in output


def test_unknown_arguments_name_themselves(tmp_path, config):
    output = run(tmp_path, "fit", "--config", config, "--data.max_lenght", "5", status=2)
    assert "max_lenght" in output

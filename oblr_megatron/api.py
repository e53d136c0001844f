"""The Python API, for scripts and notebooks: `load_config`, `train`, `evaluate`. Imports no torch.

    import oblr_megatron as oblr

    config = oblr.load_config("config.toml", ["num_steps=20"])
    run = oblr.train(config, nproc_per_node=2)
    print(run.records[-1]["reward/mean"])
    print(oblr.evaluate(run.model, config)["heldout"]["accuracy"])

A call runs the command of the same name in a process of its own, so checks, messages and files are the same. The
caller's process joins no process group and starts no engine. So a notebook can train again in its next cell.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import IncrementalNewlineDecoder
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from tempfile import TemporaryDirectory
from typing import IO, Any

from oblr_megatron.checks.run_dir import CONFIG_FILE
from oblr_megatron.config import Config, load_config, parse_config
from oblr_megatron.errors import EXIT_OK, EXIT_SIGNAL, EXIT_USER, RunError, UserError
from oblr_megatron.metrics import Record, read_metrics
from oblr_megatron.observe.status import read_status

__all__ = ["Config", "RunError", "TrainedRun", "UserError", "evaluate", "load_config", "parse_config", "train"]

STARTER = """\
import signal, sys
from oblr_megatron.runtime.processes import die_with
die_with(int(sys.argv.pop(1)), signal.SIGTERM)
from oblr_megatron.cli import main
sys.exit(main())
"""
ERROR = "error: "  # the start of a command's last line, which becomes the exception
POLL_S = 0.2  # seconds between checks whether a silent command has ended
FORCED = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")  # rich takes them for a terminal; Jupyter sets one


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run's directory after `train`. Example: TrainedRun(Path("run/config")).records[-1]["reward/mean"]"""

    run_dir: Path

    @property
    def records(self) -> list[Record]:
        """The metrics of each step, as in metrics.jsonl (docs/metrics.md)."""
        return read_metrics(self.run_dir)

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.run_dir / "report.html"

    @property
    def model(self) -> Path | None:
        """The trained model in Hugging Face format; None without one: the run has stopped, or exports none."""
        exported = self.run_dir / "hf"
        return exported if exported.is_dir() and read_status(self.run_dir).state == "finished" else None


def train(config: Config, *, nproc_per_node: int = 1, resume: bool = False) -> TrainedRun:
    """Train, as `oblr-megatron train` does. An interrupt saves a checkpoint first, as Ctrl-C does there.

    Args:
        config: from `load_config` or `parse_config`.
        nproc_per_node: ranks on this machine.
        resume: continue from the newest intact checkpoint of config.run_dir, if there is one.

    Raises:
        UserError: a mistake in the input, before any rank or engine is started.
        RunError: the run failed.
        KeyboardInterrupt: after the run has stopped.
    """
    _check_config(config)
    options = ["--nproc-per-node", str(nproc_per_node), *(["--resume"] if resume else [])]
    with TemporaryDirectory(prefix="oblr-api-") as scratch:
        _run(["train", _saved(config, scratch), *options])
    return TrainedRun(config.run_dir)


def evaluate(
    model: str | Path,
    config: Config | None = None,
    *,
    data: Mapping[str, str | Path] | None = None,
    k: int | None = None,
    out: str | Path | None = None,
    adapter: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Measure the accuracy of a model on held-out sets, as `oblr-megatron eval` does.

    Args:
        model: Hugging Face directory.
        config: template, reward and sampling of a run; the defaults if None.
        data: sets by name, each a path or a source of docs/data.md; by default those of config.evaluate.
        k: sampled responses of a prompt; by default config.evaluate.samples_per_prompt.
        out: new directory for all responses.
        adapter: a LoRA adapter of the model, in PEFT's format.
        overrides: section.key=value.

    Returns:
        The metrics of each set with their 95% intervals, see docs/evaluate.md.
        Example: {"heldout": {"prompts": 512, "k": 4, "accuracy": {"value": 0.98, "low": 0.96, "high": 0.99}, ...}}

    Raises:
        UserError: a mistake in the input, before an engine is started.
        RunError: an engine failed, or a file cannot be written.
    """
    if config is not None:
        _check_config(config)
    if data is not None and not isinstance(data, Mapping):
        raise UserError(f"data is a {type(data).__name__}, not a dict", where="data", fix="pass {name: path}")
    with TemporaryDirectory(prefix="oblr-api-") as scratch:
        metrics = Path(scratch) / "metrics.json"
        command = ["eval", "--model", str(model), "--json", str(metrics), *overrides]
        if config is not None:
            command += ["--config", _saved(config, scratch)]
        if data:
            _check_names(data)
            command += ["--data", *(f"{name}={source}" for name, source in data.items())]
        if k is not None:
            command += ["--k", str(k)]
        if out is not None:
            command += ["--out", str(out)]
        if adapter is not None:
            command += ["--adapter", str(adapter)]
        _run(command)
        sets: dict[str, dict[str, Any]] = json.loads(metrics.read_text(encoding="utf-8"))["sets"]
    return sets


def _check_config(config: object) -> None:
    """Refuse what is no Config, such as the path of one."""
    if not isinstance(config, Config):
        what = f"config is a {type(config).__name__}, not a Config"
        raise UserError(what, where="config", fix="pass load_config(path) or parse_config(table)")


def _check_names(data: Mapping[str, str | Path]) -> None:
    """Refuse names of sets that the command would read as something else."""
    from oblr_megatron.data.sources import named_source
    from oblr_megatron.evaluation.setup import split_overrides

    for name, source in data.items():
        text = f"{name}={source}"
        if split_overrides([text])[1] or named_source(text)[0] != name:
            fix = "use letters, digits, '_' and '-', and no key of the configuration"
            raise UserError(f"a data set cannot have the name {name!r}", where="data", fix=fix)


def _saved(config: Config, directory: str) -> str:
    table, path = config.model_dump(mode="json"), Path(directory) / CONFIG_FILE
    if "name" not in config.reward.model_fields_set:  # the data may choose it (`with_own_scores`)
        del table["reward"]["name"]
    path.write_text(json.dumps(table), encoding="utf-8")
    return str(path)


def _run(arguments: Sequence[str]) -> None:
    """Run a command and print its output; its last error line becomes an exception.

    The process has a session of its own: Ctrl-C reaches it once, through the caller, in a terminal and in a notebook.
    It gets SIGTERM when the caller dies, so that no run outlives its notebook.
    """
    plain = {name: text for name, text in os.environ.items() if name not in FORCED}
    child = Popen(
        [sys.executable, "-P", "-c", STARTER, str(os.getpid()), *arguments],
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env=plain | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert child.stdout is not None, "it is a pipe"
    interrupted, reason = False, ""
    while True:
        try:
            for line in _lines(child, child.stdout):
                is_error = line.startswith(ERROR)
                print(reason if is_error else line, end="", flush=True)  # an earlier error is not the last line
                reason = line.removeprefix(ERROR) if is_error else reason
            status = child.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
            child.send_signal(signal.SIGINT)
        except BaseException:  # the command must not outlive its caller
            child.terminate()
            raise
    if interrupted or status in (-signal.SIGINT, EXIT_SIGNAL + signal.SIGINT):
        raise KeyboardInterrupt
    if status == EXIT_USER:
        raise UserError(reason.rstrip() or "the command ended with status 2; its lines above say why")
    if status != EXIT_OK:
        raise RunError(reason.rstrip() or f"the command ended with status {status}; its lines above say why")


def _lines(child: Popen[bytes], stream: IO[bytes]) -> Iterator[str]:
    """The lines that a command writes until it ends. A background process of a reward may hold the pipe for longer."""
    decoder = IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("replace"), translate=True)
    text = ""
    with DefaultSelector() as selector:
        selector.register(stream, EVENT_READ)
        while True:
            ended = child.poll() is not None  # before the look, so that nothing is written in between
            if not selector.select(0 if ended else POLL_S):
                if ended:
                    break
                continue
            data = os.read(stream.fileno(), 2**16)
            *lines, text = (text + decoder.decode(data, final=not data)).split("\n")
            yield from (f"{line}\n" for line in lines)
            if not data:
                break
    if text:
        yield text

"""The two Java programs that come with pycocoevalcap: Stanford's PTB tokenizer and METEOR 1.5.

Their jars are run from here, not through pycocoevalcap's wrappers, which write into the installed package, wait
without limit and take the machine's locale for the encoding. The commands are the same, so the values are too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from pf2lora.errors import missing_extra

START_SECONDS = 240.0  # METEOR reads a 60 MB table first: seconds here, more on a loaded machine
SECONDS_PER_LINE = 0.5

_LINE_ENDS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


class Absent(Exception):
    """A score cannot be computed here; the message is the reason."""


def ptb_tokenize(sentences: Sequence[str]) -> list[str]:
    """Lower-cased Penn-treebank words of each sentence without punctuation, joined by spaces."""
    jar = _package_folder() / "tokenizer" / "stanford-corenlp-3.4.1.jar"
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS

    command = ["-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
    command += ["-preserveLines", "-lowerCase", "-encoding", "UTF-8"]
    with _java(command) as program, program.limited(len(sentences)) as process:
        output, _ = process.communicate("".join(f"{_one_line(sentence)}\n" for sentence in sentences))
        lines = output.removesuffix("\n").split("\n")
        if process.returncode != 0 or len(lines) != len(sentences):
            raise Absent("the Java tokenizer failed")
    return [" ".join(word for word in line.split(" ") if word not in PUNCTUATIONS) for line in lines]


def meteor(system: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """METEOR 1.5 of the whole output (English, `-norm`), each item against its best reference."""
    with _meteor() as program, program.limited(len(system)) as process:
        statistics = [
            _ask(process, " ||| ".join(["SCORE", *map(_field, item), _field(output)]))
            for output, item in zip(system, references, strict=True)
        ]
        first = _ask(process, " ||| ".join(["EVAL", *statistics]))
        # One line for each item, then one for all of them together.
        lines = [first, *(_answer(process) for _ in system)]
    return float(lines[-1])


@contextmanager
def one_meteor() -> Iterator[None]:
    """All calls of `meteor` inside share one process, which reads its tables once."""
    with ExitStack() as at_the_end:
        token = _KEPT.set(_Kept(at_the_end))
        try:
            yield
        finally:
            _KEPT.reset(token)


@contextmanager
def _meteor() -> Iterator[_Program]:
    """METEOR running: the one that is kept, started at its first use, or one of its own."""
    command = ["-Xmx2G", "-jar", str(_package_folder() / "meteor" / "meteor-1.5.jar")]
    command += ["-", "-", "-stdio", "-l", "en", "-norm"]
    kept = _KEPT.get()
    if kept is None:
        with _java(command) as program:
            yield program
        return
    kept.program = kept.program or kept.at_the_end.enter_context(_java(command))
    try:
        yield kept.program
    except Absent:
        kept.program = None  # the next call starts another
        raise


def _package_folder() -> Path:
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise Absent(str(missing_extra("pycocoevalcap", "nlg", "this score")))
    return Path(next(iter(spec.submodule_search_locations)))


def _one_line(text: str) -> str:
    """The text without any character that Java or Python takes for the end of a line."""
    return _LINE_ENDS.sub(" ", text).strip()


def _field(text: str) -> str:
    """The text as one field of METEOR's `|||`-separated lines."""
    return _one_line(text.replace("|||", " "))


def _ask(process: subprocess.Popen[str], line: str) -> str:
    try:
        _pipe(process.stdin).write(f"{line}\n")
        _pipe(process.stdin).flush()
    except OSError:
        raise Absent("METEOR's Java process ended early") from None
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> str:
    answer = _pipe(process.stdout).readline().strip()
    if not answer:
        raise Absent("METEOR's Java process ended early")
    return answer


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # both ends are pipes, by _java
    return stream


@dataclass(frozen=True)
class _Program:
    """A running Java program and where it complains."""

    process: subprocess.Popen[str]
    complaints: IO[str]

    @contextmanager
    def limited(self, lines: int) -> Iterator[subprocess.Popen[str]]:
        """`Absent`, with the reason, where it fails or does not answer so many lines in time."""
        limit = START_SECONDS + SECONDS_PER_LINE * lines
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill(self.process)

        timer = threading.Timer(limit, expire)
        timer.start()
        try:
            yield self.process
        except Absent as reason:
            if expired.is_set():
                raise Absent(f"Java gave no answer within {limit:.0f} s") from None
            raise Absent(f"{reason}{_last_line(self.complaints)}") from None
        finally:
            timer.cancel()


@dataclass
class _Kept:
    """METEOR's process inside `one_meteor`, once it runs, and what ends it."""

    at_the_end: ExitStack
    program: _Program | None = None


_KEPT: ContextVar[_Kept | None] = ContextVar("kept", default=None)


@contextmanager
def _java(arguments: list[str]) -> Iterator[_Program]:
    """A running Java program, which is surely gone afterwards; `Absent` where there is no Java."""
    java = shutil.which("java")
    if java is None:
        raise Absent(
            "needs Java, and there is no 'java' on the PATH (Debian: apt install default-jre-headless)"
        )
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            [java, "-Dfile.encoding=UTF-8", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that what a wrapper script starts can be ended with it
        )
        try:
            yield _Program(process, complaints)
        finally:
            _kill(process)
            process.communicate()  # waits, and closes the pipes


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _last_line(complaints: IO[str]) -> str:
    complaints.seek(0)
    lines = complaints.read().strip().split("\n")
    return f": {lines[-1].strip()}" if lines[-1] else ""

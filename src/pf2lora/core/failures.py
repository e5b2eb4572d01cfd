"""Whose failure an error is: memory that ended, or the compiler's."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import torch

# As torch and its libraries say it, of a device's memory and of the host's, where the error is no kind of its own.
OUT_OF_MEMORY = ("out of memory", "not enough memory", "STATUS_ALLOC_FAILED")
# Where the errors of torch's compiler, and of what it calls, are defined.
COMPILERS = ("torch._dynamo", "torch._inductor", "triton")


def ran_out(error: BaseException) -> bool:
    """Whether memory has ended, on the device or on the host: by the error's kind or its line, or those of the errors
    that it came after, as when a recording is broken off."""
    for each in errors_of(error):
        line = (str(each).splitlines() or [""])[0]
        said = isinstance(each, RuntimeError) and any(words in line for words in OUT_OF_MEMORY)
        if said or isinstance(each, torch.OutOfMemoryError | MemoryError):
            return True
    return False


def compiler_failed(error: BaseException) -> bool:
    """Whether a compiled pass failed by its compiler: by where the error's kind, or that of one that it came after, is
    from. Memory may end while something is compiled, too, and is not the compiler's fault."""
    kinds = (type(each).__module__ for each in errors_of(error))
    return any(kind.startswith(COMPILERS) for kind in kinds) and not ran_out(error)


def errors_of(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came after, the first one last. What was being handled when all of it began is none
    of them."""
    here = {frame for frame, _ in traceback.walk_tb(error.__traceback__)}
    yield error
    while before := error.__cause__ or error.__context__:
        if here and here.isdisjoint(frame for frame, _ in traceback.walk_tb(before.__traceback__)):
            return
        yield before
        error = before

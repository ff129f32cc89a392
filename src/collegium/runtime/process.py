"""Set-up of a process that trains: threads, denormals, determinism, memory allocator."""

import ctypes
import multiprocessing
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

import torch

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "8000000000", "MALLOC_TRIM_THRESHOLD_": "16000000000"}
"""glibc settings for worker processes.

Without them activations above 32 MB are mapped and zeroed again at every step. The C library reads
them when a process starts, hence they are set in the environment in which workers are started.
"""


VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs a process sees; CUDA reads it at its first use."""


def shared_gpus(device: str) -> list[str]:
    """Return the GPUs that the processes of this one share, as `VISIBLE` names them.

    Args:
        device: where to compute; "cuda" without a number is any GPU, and all else shares none.
    """
    if device != "cuda":
        return []
    named = os.environ.get(VISIBLE)
    return named.split(",") if named else [*map(str, range(torch.cuda.device_count()))]


def share_of(gpus: Sequence[str], slot: int, slots: int) -> list[str]:
    """Return the GPUs of one of several processes: its own, or one with others if they are few.

    Args:
        gpus: all GPUs.
        slot: the number of the process, from 0.
        slots: how many processes there are.
    """
    return [*gpus[slot::slots]] or [gpus[slot % len(gpus)]] if gpus else []


def prepare(threads: int = 1) -> None:
    """Fix all settings of this process on which the bits of a result depend.

    Denormal numbers are flushed to zero, which has to happen before torch starts its threads (a
    convolution over denormals is some hundred times slower); the number of threads decides in which
    order sums are taken; TF32 and non-deterministic kernels are off. Idempotent.

    Args:
        threads: torch threads of this process; results depend on it.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    _keep_freed_memory()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # takes a second less than torch.use_deterministic_algorithms, which imports a compiler
    torch.set_deterministic_debug_mode("error")
    # otherwise every new tensor is filled once more
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _keep_freed_memory() -> None:
    """Set glibc to reuse large blocks of memory instead of mapping them again each time.

    The same as `ALLOCATOR`, for a process that is running already. A process that was started with
    a setting of its own keeps it.
    """
    if platform.system() == "Windows":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not ALLOCATOR.keys() & os.environ:
        mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


def end_with_parent() -> None:
    """Have this process end as soon as the process that started it has ended, however it ended.

    A process that computes would notice only when it wants to answer. What is stored stays whole,
    whenever a process ends. For processes of `multiprocessing`; in another one it does nothing.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


@contextmanager
def environment_of_workers(threads: int = 1, gpus: Sequence[str] = ()) -> Iterator[None]:
    """Set the environment of worker processes that are started inside the block.

    Args:
        threads: torch threads of each process.
        gpus: the GPUs that the processes see; none given: those that this process sees.
    """
    values = ALLOCATOR | {"OMP_NUM_THREADS": str(threads)}
    if gpus:
        values[VISIBLE] = ",".join(gpus)
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

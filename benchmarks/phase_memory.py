"""Seconds and peak memory of the phases of an iteration, taken inside the learner's process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import environment

from trial_ray.files import write_text
from trial_ray.process_reports import peak_memory

POLL_S = 0.1
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to ``clear_refs``: the peak of the resident memory starts again at its present value (Linux)."""


class PhaseMeter:
    """Measures sampling (the learner is idle), scoring, update and weight sync of one iteration, beginning with sampling.

    It wraps the learner's methods that begin the phases, and stays for one iteration.

    Args:
        learner: a built ``GRPOLearner`` of this process.
        file: the phases are written there as they end, and during the update after each optimizer step; ``None``: nowhere.

    Attributes:
        phases: by name ``seconds`` and, in bytes, ``host_peak`` (resident memory of this process; ``None`` where the system
            cannot start the peak again); on CUDA also ``torch_peak`` (allocated tensors), ``torch_reserved_peak`` (the
            allocator's blocks) and ``device_peak`` (all processes on the device, looked at every 0.1 s).
    """

    def __init__(self, learner: Any, file: Path | None) -> None:
        self._device = torch.device(learner.device)
        self._file = file
        self._environment = environment() if file else {}
        self.phases: dict[str, dict[str, Any]] = {}
        self._steps = [0, 0]
        self._device_peak = 0
        self._ended = threading.Event()
        self._wrapped = [(learner, name) for name in ("_finished_rows", "_optimizer_steps", "_optimizer_step")]
        learner._finished_rows = self._scoring(learner._finished_rows)
        learner._optimizer_steps = self._update(learner._optimizer_steps)
        learner._optimizer_step = self._step(learner._optimizer_step)
        if self._cuda:
            threading.Thread(target=self._poll, daemon=True).start()
        self._begin("sampling")

    @property
    def _cuda(self) -> bool:
        return self._device.type == "cuda"

    def finish(self) -> dict[str, dict[str, Any]]:
        """End the last phase and take the wrappers off; returns :attr:`phases`."""
        self._end()
        self._ended.set()
        for learner, name in self._wrapped:
            delattr(learner, name)  # the class's method is there again
        return self.phases

    def _scoring(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def finished_rows(*args: Any) -> Any:
            self._begin("scoring")
            rows, plan = function(*args)
            self._steps = [0, len(plan.steps)]
            return rows, plan

        return finished_rows

    def _update(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def optimizer_steps(*args: Any) -> Any:
            self._begin("update")
            found = function(*args)
            self._begin("sync")
            return found

        return optimizer_steps

    def _step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def optimizer_step(*args: Any) -> Any:
            found = function(*args)
            self._steps[0] += 1
            self._write()
            return found

        return optimizer_step

    def _begin(self, phase: str) -> None:
        self._end()
        self._phase, self._began = phase, time.perf_counter()
        self._resets = _reset_host_peak()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._device_peak = 0
            self._look()
        self._write()

    def _end(self) -> None:
        if hasattr(self, "_phase"):
            self.phases[self._phase] = {"seconds": time.perf_counter() - self._began, **self._peaks()}

    def _peaks(self) -> dict[str, int | None]:
        found = {"host_peak": peak_memory()["host_bytes"] if self._resets else None}
        if self._cuda:
            self._look()
            found["torch_peak"] = torch.cuda.max_memory_allocated(self._device)
            found["torch_reserved_peak"] = torch.cuda.max_memory_reserved(self._device)
            found["device_peak"] = self._device_peak
        return found

    def _look(self) -> None:
        free, total = torch.cuda.mem_get_info(self._device)
        self._device_peak = max(self._device_peak, total - free)

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            self._look()

    def _write(self) -> None:
        if self._file is None:
            return
        details: dict[str, Any] = {"phases": self.phases, "unfinished": self._phase}
        if self._phase == "update":
            done, steps = self._steps
            seconds = time.perf_counter() - self._began
            details["update"] = {
                "seconds": seconds,
                "steps_done": done,
                "steps": steps,
                "expected_seconds": seconds / done * steps if done else None,
            }
        record = {"measures": [], "environment": self._environment, "details": details}
        write_text(self._file, json.dumps(record, indent=2) + "\n")


def _reset_host_peak() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True

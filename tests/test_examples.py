"""The examples run, and leave what they say they leave."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_statistics_are_logged_to_tensorboard(tmp_path):
    command = [sys.executable, EXAMPLES / "log_to_tensorboard.py", "runs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    logged = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    of_all = ("grad_norm", "param_norm", "update_norm", "clip_factor", "nonfinite", "skipped")
    tensors = [f"{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")]
    assert {*logged} == {"loss"} | {f"step/{n}" for n in of_all} | {f"grad_norm/{n}" for n in tensors}
    assert [event.step for event in events.Scalars("loss")] == [*range(0, 200, 20)]
    assert all(math.isfinite(value) for values in logged.values() for value in values)
    assert logged["loss"][-1] < 0.1 * logged["loss"][0]
    # the norm of all is made of those of each
    for norm, *each in zip(logged["step/grad_norm"], *(logged[f"grad_norm/{n}"] for n in tensors), strict=True):
        assert norm == pytest.approx(math.hypot(*each), rel=1e-4)
    assert logged["step/clip_factor"][0] < 1
    assert not any(logged["step/skipped"])

"""A real job whose script raises what a rule calls the hardware's."""

from __future__ import annotations

from pathlib import Path

import local_run
import pytest
from local_run import explain

SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import deadpool_runtime as deadpool

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
raised = Path(sys.argv[1])
for step, batch in deadpool.attach(model, optimizer).steps([torch.ones(2, 4)] * 8):
    with step:
        optimizer.zero_grad()
        model(batch).mean().backward()
        if step.number == 4 and dist.get_rank() == 1 and not raised.exists():
            raised.touch()
            raise RuntimeError(sys.argv[2])
        optimizer.step()
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "local3 takes rank 1"),
        ("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR", "restarted on local2"),
    ],
)
def test_job_goes_on_after_an_exception_of_the_hardware(
    error: str, line: str, tmp_path: Path
) -> None:
    script = tmp_path / "raises.py"
    script.write_text(SCRIPT)
    arguments = ("--nodes", 2, "--spares", 1, "--", tmp_path / "raised", error)
    done = local_run.run(tmp_path / "run", *arguments, script=script)
    assert done.returncode == 0, explain(done, tmp_path / "run")
    assert line in done.stdout
    assert "; rule gpu-" in done.stdout

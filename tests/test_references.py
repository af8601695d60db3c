"""The references that `fusedstep check` compares with, against recorded runs of the authors' packages."""

import pytest
import torch

from fusedstep.cli import references
from fusedstep.cli.subjects import reference_of
from tests.test_family import CASES, close_to, default_dtype, name_of, ours_of, run, start  # noqa: F401


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_reference_takes_the_steps_of_its_authors(case, default_dtype):  # noqa: F811
    default_dtype(getattr(torch, case["default_dtype"]))
    params = [*start()]
    # timm keeps a number of each tensor in torch's default dtype
    tolerance = 1e-6 if (case["optimizer"], case["default_dtype"]) == ("NovoGrad", "float32") else 1e-9
    optimizer = reference_of(case["optimizer"], ours_of(case))(params, **ours_of(case))
    for t in run(optimizer, params, 100, case["wave"]):
        if str(t) in case["params"]:
            close_to(params, case["params"][str(t)], tolerance)
    if "eval" in case:
        optimizer.eval()
        close_to(params, case["eval"], 1e-9)


def test_every_reference_is_proven_by_a_recorded_run_or_made_of_one_that_is():
    proven = {reference_of(case["optimizer"], ours_of(case)) for case in CASES}
    written = [cls for cls in vars(references).values() if isinstance(cls, type)]
    written = {cls for cls in written if issubclass(cls, references.Reference)} - {references.Reference}
    # what runs on Ascend only, of which tests/test_npu.py has numbers; and words, which torch has too
    assert {cls.__name__ for cls in written - proven} == {
        "Adam", "EmaAdamW", "NpuFusedBertAdam", "NpuFusedLamb", "NpuFusedRMSpropTF", "Words",
        # tests/test_muon.py compares them with torch's
        "BesideMuon", "Muon",
    }  # fmt: skip


def test_a_reference_refuses_options_that_it_does_not_have():
    with pytest.raises(TypeError, match=r"Lion takes no \['momentum'\]"):
        references.Lion([torch.nn.Parameter(torch.ones(1))], momentum=0.9)

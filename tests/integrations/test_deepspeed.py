"""DeepSpeed with an optimizer of ours as its client optimizer: it shards, scales and clips, ours steps."""

import deepspeed
import pytest
import torch
import torch.distributed as dist

import fusedstep
from tests.integrations import twins


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_RANK", "RANK"):
            patch.setenv(name, "0")
        store = tmp_path_factory.mktemp("ranks") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        yield
        if dist.is_initialized():
            dist.destroy_process_group()


def sped(make, stage, steps=3, resume=None, save=None, dtype=torch.bfloat16):
    model = twins.model().to(dtype)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": twins.LIMIT,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    optimizer = make(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    x, y = twins.data()
    if resume:
        engine.load_checkpoint(str(resume))
    for i in range(2 if resume else 0, steps):
        loss = torch.nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        if save and i == 1:
            engine.save_checkpoint(str(save))
    return engine


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_steps_ours_as_torchs_and_clips_itself(stage):
    ours = sped(lambda params: fusedstep.AdamW(params, lr=0.05), stage)
    theirs = sped(lambda params: torch.optim.AdamW(params, lr=0.05), stage)
    assert type(ours.basic_optimizer) is fusedstep.AdamW
    # what a step gets of ZeRO is one flat part for many tensors: no norm of its own would mean anything
    (group,) = ours.basic_optimizer.param_groups
    assert [p.dim() for p in group["params"]] == ([1] if stage else [2, 1, 2, 1])
    twins.assert_close(ours.module, theirs.module, 1e-2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_resumes_bit_by_bit(stage, tmp_path):
    make = lambda params: fusedstep.AdamW(params, lr=0.05)
    whole = sped(make, stage, steps=4, save=tmp_path)
    again = sped(make, stage, steps=4, resume=tmp_path)
    twins.assert_equal(whole.module, again.module)

"""LLM Foundry's registry finds our entry points, Composer's Trainer takes our optimizers."""

import pytest
import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.models import ComposerModel

import fusedstep
from fusedstep.registry import CLASSES
from tests.integrations import beside, twins

beside.without_init("llmfoundry", "llmfoundry.utils")
from llmfoundry.utils.registry_utils import construct_from_registry, create_registry  # noqa: E402


@pytest.fixture(scope="module")
def foundry():
    # as llmfoundry/registry.py makes it
    return create_registry("llmfoundry", "optimizers", generic_type=type, entry_points=True)


@pytest.mark.parametrize("name", CLASSES)
def test_llm_foundrys_registry_finds_our_entry_points(name, foundry):
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    made = construct_from_registry(
        name=f"fused_{name}",
        registry=foundry,
        pre_validation_function=torch.optim.Optimizer,
        kwargs={"params": params, "lr": 0.1},
    )
    assert type(made) is CLASSES[name]


class Composed(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layers = twins.model()

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


def composed(make, clip=None, **options):
    model = Composed()
    trainer = Trainer(
        model=model,
        optimizers=make(model.parameters()),
        train_dataloader=torch.utils.data.DataLoader(twins.dataset(), batch_size=8),
        algorithms=[GradientClipping("norm", clip)] if clip else [],
        max_duration="6ba",
        device="cpu",
        progress_bar=False,
        **options,
    )
    trainer.fit()
    return trainer


def test_composer_trains_as_with_torchs_and_the_step_clips_as_its_algorithm_would():
    ours = composed(lambda params: fusedstep.AdamW(params, lr=0.05, max_grad_norm=twins.LIMIT))
    theirs = composed(lambda params: torch.optim.AdamW(params, lr=0.05), clip=twins.LIMIT)
    twins.assert_close(ours.state.model, theirs.state.model)


def test_composer_resumes_bit_by_bit(tmp_path):
    make = lambda params: fusedstep.AdamW(params, lr=0.05)
    folder = {"save_folder": str(tmp_path), "save_interval": "3ba", "save_filename": "ba{batch}.pt"}
    whole = composed(make, **folder)
    again = composed(make, load_path=str(tmp_path / "ba3.pt"), load_weights_only=False)
    assert again.state.timestamp.batch == 6
    twins.assert_equal(whole.state.model, again.state.model)
    twins.assert_states_equal(whole.state.optimizers[0], again.state.optimizers[0])

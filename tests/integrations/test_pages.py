"""The recipes: their Python runs, their YAML makes optimizers, and their versions are those that are tested."""

import doctest
import importlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import instantiate
from mmengine.optim import build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS  # noqa: F401  (registers)
from nemo_automodel.components.config.loader import ConfigNode

import fusedstep
from tests.integrations import twins
from tests.test_docs import blocks

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
# by the comment in their first line
CONFIGS = {
    text.splitlines()[0].removeprefix("# "): yaml.safe_load(text)
    for page in PAGES
    for language, text, _ in blocks(page)
    if language == "yaml"
}


@pages
def test_the_python_of_a_recipe_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for language, text, line in blocks(page):
        if language == "python":
            exec(compile("\n" * line + text, str(page), "exec"), names)


@pages
def test_a_recipe_has_known_languages_only(page):
    assert {language for language, _, _ in blocks(page)} <= {"python", "yaml", "shell", "{eval-rst}"}


@pytest.mark.parametrize("name", ["hugging_face", "axolotl", "llama_factory", "torchtitan"])
def test_examples_in_docstrings_are_right(name):
    result = doctest.testmod(importlib.import_module(f"fusedstep.integrations.{name}"))
    assert result.attempted
    assert not result.failed


def test_the_versions_on_the_pages_are_those_installed():
    text = "\n".join(page.read_text() for page in PAGES)
    named = {
        "transformers' Trainer": "transformers",
        "accelerate": "accelerate",
        "TRL: SFTTrainer, DPOTrainer": "trl",
        "PEFT": "peft",
        "Trainer": "lightning",
        "LitGPT": "litgpt",
        "NeMo AutoModel": "nemo-automodel",
        "veRL": "verl",
        "torchtitan": "torchtitan",
        "LLM Foundry": "llm-foundry",
        "Composer": "mosaicml",
        "DeepSpeed": "deepspeed",
        "axolotl": "axolotl",
        "ms-swift": "ms-swift",
        "LLaMA-Factory, version 1": "llamafactory",
        "timm": "timm",
        "fastai": "fastai",
        "mmengine": "mmengine",
        "Ignite": "pytorch-ignite",
        "skorch": "skorch",
        "Opacus": "opacus",
        "Stable-Baselines3": "stable-baselines3",
    }
    for name, package in named.items():
        (version,) = re.findall(rf"^\| {re.escape(name)} \| ([\d.]+)", text, re.MULTILINE)
        assert f"{metadata.version(package)}.".startswith(f"{version}."), name


def made(name):
    config = CONFIGS[name]
    return config["optimizer"], twins.model().parameters()


def test_hydras_file_makes_an_optimizer():
    config, params = made("Hydra")
    assert instantiate(config)(params=params).state_dtype is torch.float32


def test_nemos_file_makes_an_optimizer():
    config, params = made("NeMo AutoModel")
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in params]
    optimizer = ConfigNode(config).instantiate(params=params)
    assert type(optimizer) is fusedstep.AdamW
    assert optimizer.master == "split"
    assert optimizer.state_dtype is torch.float32


def test_lightnings_and_litgpts_files_make_optimizers():
    from lightning.pytorch.cli import instantiate_class
    from litgpt.utils import instantiate_torch_optimizer

    config, params = made("LightningCLI")
    assert type(instantiate_class(params, config)) is fusedstep.AdamW
    config, params = made("LitGPT")
    assert instantiate_torch_optimizer(config, params, fused=False).param_groups[0]["lr"] == 0.0004


def test_llm_foundrys_file_names_an_entry_point():
    config, params = made("LLM Foundry")
    (point,) = metadata.entry_points(group="llmfoundry_optimizers", name=config.pop("name"))
    assert type(point.load()(params, **config)) is fusedstep.AdamW


def test_axolotls_file_names_our_plugin_and_its_entry():
    from axolotl.integrations.base import load_plugin
    from transformers import TrainingArguments

    config = CONFIGS["axolotl"]
    plugin = load_plugin(config["plugins"][0])

    class Holder:
        args = TrainingArguments("out", use_cpu=True)

    plugin.post_trainer_create(config, Holder)
    cls, options = Holder.optimizer_cls_and_kwargs
    assert cls is fusedstep.AdamW
    assert options["state_dtype"] == "int8"


def test_llama_factorys_file_makes_an_optimizer():
    from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin

    import fusedstep.integrations.llama_factory

    config = CONFIGS["LLaMA-Factory"]["optim_config"]
    assert type(OptimizerPlugin(config["name"])(twins.model(), config)) is fusedstep.AdamW


def test_mmengines_file_makes_a_wrapper():
    wrapper = build_optim_wrapper(twins.model(), CONFIGS["mmengine"]["optim_wrapper"])
    assert type(wrapper.optimizer) is fusedstep.AdamW
    assert {group["weight_decay"] for group in wrapper.optimizer.param_groups} == {0.05, 0.0}


def test_none_of_the_frameworks_is_imported_with_the_library():
    code = "import sys, fusedstep; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    tops = {name.split(".")[0] for name in found}
    assert not tops & {"transformers", "lightning", "axolotl", "torchtitan", "swift", "llamafactory", "timm"}
    assert not any(name.startswith("fusedstep.integrations") for name in found)

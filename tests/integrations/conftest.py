"""Trainers and libraries, offline: what they would download or ask a server is switched off."""

import os

import pytest

from tests.integrations import beside

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "WANDB_DISABLED", "NO_COLOR")
os.environ |= dict.fromkeys(OFFLINE, "1")
os.environ["DS_ACCELERATOR"] = "cpu"
beside.allow_torchvision()


@pytest.fixture(autouse=True)
def one_thread_everywhere(one_thread):
    """As in the other tests of trainers."""

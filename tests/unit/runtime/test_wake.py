"""A device that cannot be woken is left to who uses it."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.launch import HANG_S
from tlora_megatron.runtime.backbone import wake_device


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("local_rank", ["0", "99"])
def test_what_is_wrong_with_a_device_is_not_said_here(
    monkeypatch: pytest.MonkeyPatch, local_rank: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    for is_there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=is_there: found)
        thread = wake_device()
        thread.join(HANG_S)
        assert not thread.is_alive()

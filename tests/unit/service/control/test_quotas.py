"""Quotas of tenants: how many GPUs their training jobs may ask for together."""

from __future__ import annotations

from tests.helpers.live_service import LiveService, folder_in_memory
from tlora_megatron.service.store import TenantLimits


def test_a_tenant_s_jobs_hold_no_more_gpus_than_its_quota() -> None:
    with folder_in_memory() as folder:
        service = LiveService(folder, gpus=2, policy="isolated")
        service.store.tenants.set_limits("local", TenantLimits(gpus=1))
        for name in "ab":
            service.submit(name, steps=200)
        service.run(20)
        assert sorted(service.states().values()) == ["queued", "running"]
        service.store.tenants.set_limits("local", TenantLimits(gpus=2))
        service.run(20)
        assert set(service.states().values()) == {"running"}
        service.store.tenants.set_limits("local", TenantLimits(gpus=1))
        service.restart()
        service.run(5)
        assert set(service.states().values()) == {"running"}, "a smaller quota ends nothing"
        service.run()

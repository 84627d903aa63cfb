"""Limits of tenants."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import select

from tlora_megatron.service.home import check_tenant
from tlora_megatron.service.store.sql import tables
from tlora_megatron.service.store.sql.database import Database
from tlora_megatron.service.store.tenancy.values import TenantLimits

_TENANT = tables.tenant.c
_NAMES = frozenset(item.name for item in fields(TenantLimits))


class Tenants:
    """The tenants of a store; one without a row has the limits that all have."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def limits(self, tenant: str) -> TenantLimits:
        """How much a tenant may have."""
        query = select(_TENANT.limits).where(_TENANT.name == tenant)
        with self._database.read() as connection:
            return _as_limits(connection.execute(query).scalar())

    def all_limits(self) -> dict[str, TenantLimits]:
        """Limits of the tenants that have some of their own."""
        with self._database.read() as connection:
            rows = connection.execute(select(tables.tenant).order_by(_TENANT.name))
            return {row.name: _as_limits(row.limits) for row in rows}

    def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """Replaces a tenant's limits.

        Raises:
            ValueError: if no tenant can be called so.
        """
        row = {"name": check_tenant(tenant), "limits": asdict(limits)}
        with self._database.write() as connection:
            connection.execute(tables.tenant.delete().where(_TENANT.name == tenant))
            connection.execute(tables.tenant.insert(), row)


def _as_limits(row: dict[str, Any] | None) -> TenantLimits:
    return TenantLimits(**{name: value for name, value in (row or {}).items() if name in _NAMES})

"""All routes of the `openai` client but those that generate text."""

from __future__ import annotations

from fastapi import APIRouter

from tlora_megatron.service.api.openai import files, jobs, models
from tlora_megatron.service.api.service import Service


def router(service: Service) -> APIRouter:
    """The routes of files, fine-tuning and models."""
    routes = APIRouter()
    for room in (files, jobs, models):
        routes.include_router(room.router(service))
    return routes

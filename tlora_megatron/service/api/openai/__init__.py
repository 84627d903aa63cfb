"""The interface of the `openai` client: `/v1/files`, `/v1/fine_tuning/jobs` and `/v1/models`."""

"""The service's own interface: `/v1/jobs` and what belongs to a job."""

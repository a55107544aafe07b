"""Requests of whole trainings."""

from trainer.loading.requests import training_requests


def requests_of_plan(plan, index, geometry, first=0, rank=0, world=1, **form):
    return training_requests(plan.schedule, plan.plans(first), index, geometry, first, rank, world, **form)

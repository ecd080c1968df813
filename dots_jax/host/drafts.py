"""Draft (MTP) models that share a host buffer with their target: one tail layer each."""

import dataclasses

from dots_jax.host.specs import Spec


def with_drafts(target: Spec, *drafts: Spec) -> Spec:
    """The spec of a buffer that holds a target's layers and, after them, one layer of each draft in depth order.

    The device arrays of such a buffer are `target.append(*drafts)`, and draft `d` is layer `target.num_layers + d`.

    Args:
      target: the target model's cache.
      *drafts: each draft model's cache, of one layer.

    Raises:
      TypeError: a draft keeps another kind of cache than the target.
      ValueError: a draft has not exactly one layer, or its heads, widths, page size or dtype differ from the target's;
        naming the draft, what differs, expected and got.
    """
    for depth, draft in enumerate(drafts):
        if type(draft) is not type(target):
            raise TypeError(
                f"draft {depth}: expected a {type(target).__name__} like the target, got a {type(draft).__name__}."
            )
        if draft.num_layers != 1:
            raise ValueError(f"draft {depth}: expected num_layers 1, got {draft.num_layers}.")
        for field in dataclasses.fields(target):
            want, got = getattr(target, field.name), getattr(draft, field.name)
            if field.name != "num_layers" and want != got:
                raise ValueError(f"draft {depth}: expected {field.name} {want} like the target, got {got}.")
    return dataclasses.replace(target, num_layers=target.num_layers + len(drafts))

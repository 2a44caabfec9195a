"""Decide which pairs of tokens a computed step attends to.

Read ``policies/policy.py`` first: it is the interface of a policy, which turns queries and keys into symbols (masks).
``policies/dense.py`` is the shortest policy, ``policies/sparge.py`` the usual one. Then read ``tile_site.py``, which
follows one attention in one call: the policy computes symbols, attention runs under them, the residual corrects the
output, and the probe (``probe.py``) measures the error. ``head_site.py`` extends it at level head (FlashOmni) with rows
that are reused and the cached bias of the output projection. ``site_state.py`` has the records that both keep from step
to step. ``token_order.py`` orders a video's tokens so that blocks are compact, and ``projections.py`` reads the learned
projections of SLA and VSA. The package knows no models and no pipelines.
"""

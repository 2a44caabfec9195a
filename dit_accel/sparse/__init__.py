"""Which pairs of tokens does a computed step attend to?

Read ``policies/policy.py`` first: a policy is one object, and this file has all that is asked of it; ``static.py`` and
``sparge.py`` beside it are the shortest and the usual one. Then ``tile_site.py``, which follows one attention in one
call: the policy draws symbols, attention runs under them, and the residual and the probe (``probe.py``) correct and
measure what they leave out. ``head_site.py`` goes on from there at level head (FlashOmni): rows that are reused, and
the cached bias of the output projection. ``site_state.py`` has what both remember from step to step.
``token_order.py`` orders a video's tokens so that tiles are compact, and ``projections.py`` reads what SLA learned.
The package knows no models and no pipelines.
"""
